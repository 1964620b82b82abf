"""The kernels compile for an H100 and a TPU that are not here, and move little."""

import pytest

from tests.absent_compilers import COMPILERS, ask

MOST = 1.01
"""Bytes of a one-pass call over those of its inputs and outputs."""


@pytest.fixture(autouse=True)
def compilers():
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")


def compiled(target: str, *cases: str) -> list[dict]:
    """Returns a row of what is launched and moved for each case."""
    return ask(target, "tests.pallas_kernels.moved_table:rows", "gated_scan", *cases)


def assert_one_kernel_and_least_bytes(rows: list[dict], kernels: int = 1) -> None:
    for row in rows:
        assert len(row["kernels"]) == kernels, row
        assert row["other_bytes"] < 0.01 * row["least_bytes"], row
        assert row["kernel_bytes"] < MOST * row["least_bytes"], row


def test_chunks_on_h100_are_one_kernel_that_reads_everything_once():
    rows = compiled("h100", "gpu_rat_forward")
    assert_one_kernel_and_least_bytes(rows)


@pytest.mark.slow
def test_one_kernel_on_h100_reads_everything_once_where_rows_fill_the_device():
    cases = ("rat_backward", "rnn_forward", "rnn_backward")
    rows = compiled("h100", *(f"gpu_{case}" for case in cases), "gpu_float32_backward")
    assert_one_kernel_and_least_bytes(rows)


@pytest.mark.slow
def test_a_long_row_on_h100_takes_two_kernels_and_reads_its_inputs_twice():
    forward, backward = compiled("h100", "gpu_long_forward", "gpu_long_backward")
    assert len(forward["kernels"]) == len(backward["kernels"]) == 2
    # Gate and values again: 6 of 8 bytes a channel; gate and states' gradient: 6 of 16.
    assert forward["kernel_bytes"] < 1.76 * forward["least_bytes"]
    assert backward["kernel_bytes"] < 1.39 * backward["least_bytes"]


@pytest.mark.slow
def test_a_step_of_generation_on_h100_is_one_fusion_of_xla():
    (row,) = compiled("h100", "gpu_decode")
    assert row["kernels"] == [] and len(row["others"]) == 1
    assert row["other_bytes"] < MOST * row["least_bytes"]


@pytest.mark.parametrize(
    "target",
    [  # The other ops' kernels meet the other TPUs.
        pytest.param("v6e:2x2", marks=pytest.mark.slow),
        pytest.param("v5e:2x2", marks=pytest.mark.sweep),
        pytest.param("v5p:2x2x1", marks=pytest.mark.sweep),
    ],
)
def test_both_passes_on_tpu_are_one_kernel_each_that_reads_everything_once(target):
    layers = [f"tpu_{layer}_{way}" for layer in ("rnn", "rat") for way in PASSES]
    rows = compiled(target, *layers, "tpu_float32_backward", "tpu_odd_backward")
    assert_one_kernel_and_least_bytes(rows[:-1])
    assert len(rows[-1]["kernels"]) == 1


PASSES = ("forward", "backward")
