"""What the GPU kernels compute, by Triton's interpreter on a CPU: the torch lane."""

import pytest

from pallas_kernels.selective_scan import BlockSizes, triton
from tests.pallas_kernels.laws import OracleCase
from tests.pallas_kernels.selective_scan.test_selective_scan import TestLaws as Laws
from tests.tolerances import assert_values_close

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("interpreted_launches")]
ONE = {"blocks": BlockSizes()}
STRETCHES = {"blocks": BlockSizes(channels=8, backward_channels=8, stretch=16)}
# Kernels of more than two positions per turn, and rows of stretches that are not full.
LONG = {"blocks": BlockSizes(unroll=4, backward_unroll=4, stretch=272)}


class Kernels(Laws):
    __test__ = False
    backends = {
        "triton": (triton, ONE),
        "triton stretches": (triton, STRETCHES),
        "triton long": (triton, LONG),
    }


LAWS = Kernels()
CASES = [
    OracleCase("triton", 1, {"chunk": 2}),
    OracleCase("triton", 37, {"chunk": 8}),
    OracleCase("triton", 37, {"chunk": 16, "starts": True}, "bfloat16").slow(),
    OracleCase(
        "triton stretches", 37, {"chunk": 4, "starts": True, "lengths": True}
    ).slow(),
    OracleCase("triton stretches", 37, {"chunk": 8}, "bfloat16").slow(),
    # As many channels as programs have on a device.
    OracleCase("triton", 19, {"chunk": 16, "channels": 64, "starts": True}).slow(),
    OracleCase("triton", 64, {"chunk": 32, "lengths": True}).slow(),
    OracleCase("triton stretches", 65, {"chunk": 4}).slow(),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_the_reference(case):
    LAWS.test_values_and_gradients_are_those_of_the_reference(case)


@pytest.mark.sweep
def test_a_long_row_is_that_of_the_reference(monkeypatch):
    # The interpreter goes through rows and states one by one.
    sizes = "tests.pallas_kernels.selective_scan.test_selective_scan"
    monkeypatch.setattr(f"{sizes}.B", 1)
    monkeypatch.setattr(f"{sizes}.N", 1)
    case = OracleCase("triton long", 1000, {"chunk": 16, "starts": True})
    LAWS.test_values_and_gradients_are_those_of_the_reference(case)


@pytest.mark.slow
def test_the_state_carries_over_a_cut():
    call = LAWS.call(13, chunk=4)
    (whole,) = LAWS.outputs("triton", call)
    assert_values_close(LAWS.in_two(call, 6, "triton stretches"), whole)


@pytest.mark.slow
def test_the_future_does_not_leak_into_the_past():
    LAWS.test_the_future_does_not_leak_into_the_past("triton stretches")


@pytest.mark.slow
def test_rows_do_not_mix():
    LAWS.test_rows_do_not_mix("triton stretches")
