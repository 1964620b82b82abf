"""The kernels compile for an H100 and TPUs that are not here, and move little."""

import pytest

from tests.absent_compilers import COMPILERS, ask

ROWS = "tests.pallas_kernels.moved_table:rows"
MOST = 1.3
"""Bytes of a call over those of its inputs and outputs."""


@pytest.fixture(autouse=True)
def compilers():
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")


def compiled(target: str, *cases: str) -> list[dict]:
    """Returns a row of what is launched and moved for each case."""
    return ask(target, ROWS, "selective_scan", *cases)


def assert_one_kernel_and_few_bytes(rows: list[dict]) -> None:
    for row in rows:
        assert len(row["kernels"]) == 1, row
        moved = row["kernel_bytes"] + row["other_bytes"]
        assert moved < MOST * row["least_bytes"], row


@pytest.fixture
def triton():
    if not (COMPILERS / "jax_triton").is_dir():
        pytest.skip("no jax-triton here: run make compilers")


def test_a_forward_pass_on_h100_is_one_kernel(triton):
    assert_one_kernel_and_few_bytes(compiled("h100", "gpu_training"))


@pytest.mark.slow
def test_each_pass_on_h100_is_one_kernel(triton):
    cases = ("gpu_forward", "gpu_backward", "gpu_float32_backward", "gpu_long_forward")
    assert_one_kernel_and_few_bytes(compiled("h100", *cases))


@pytest.mark.sweep
def test_a_long_row_on_h100_takes_two_kernels_and_reads_its_inputs_twice(triton):
    for row in compiled("h100", "gpu_row_forward", "gpu_row_backward"):
        assert len(row["kernels"]) == 2
        assert row["kernel_bytes"] + row["other_bytes"] < 1.8 * row["least_bytes"]


@pytest.mark.parametrize(
    "target",
    [  # The other ops' kernels meet the other TPUs.
        pytest.param("v5p:2x2x1", marks=pytest.mark.slow),
        pytest.param("v5e:2x2", marks=pytest.mark.sweep),
        pytest.param("v6e:2x2", marks=pytest.mark.sweep),
    ],
)
def test_each_pass_on_tpu_is_one_kernel(target):
    cases = ("tpu_forward", "tpu_training", "tpu_backward", "tpu_float32_backward")
    rows = compiled(target, *cases, "tpu_odd_backward")
    assert_one_kernel_and_few_bytes(rows[:-1])
    assert len(rows[-1]["kernels"]) == 1  # T and I are padded: copies
