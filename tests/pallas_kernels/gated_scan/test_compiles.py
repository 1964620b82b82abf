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
def test_no_gate_wider_than_its_logits_crosses_memory_in_training_on_h100():
    """With the sigmoid in front of the op a float32 gate and its gradient do."""
    inside, apart = compiled("h100", "gpu_training", "gpu_training_apart")
    B, T, D, C = 64, 4096, 2048, 16
    wide = 2 * B * T * D  # an array as wide as the gate, in bfloat16; keys: an eighth
    # Forward: logits, values, two streams of states. Backward: the same, the gradients
    # of both streams, and out those of logits and values. In addition the bias: a sum
    # of each chunk, made and read.
    passes = (4 + 1 / 8 + 8 + 2 / 8) * wide
    of_bias = 2 * 4 * B * T // C * D
    moved = [row["kernel_bytes"] + row["other_bytes"] for row in (inside, apart)]
    assert moved[0] < MOST * passes + of_bias
    assert moved[1] - moved[0] > 9 * wide


def test_queries_on_h100_are_read_without_the_keys_crossing_memory():
    """But for the ends of chunks: the least counts no other states of the keys."""
    (row,) = compiled("h100", "gpu_queried_inference")
    # Outside the kernel: parts of heads' logits, float32, summed.
    assert len(row["kernels"]) == 1 and row["other_bytes"] < 0.02 * row["least_bytes"]
    assert row["kernel_bytes"] < MOST * row["least_bytes"]


@pytest.mark.slow
def test_one_kernel_on_h100_reads_everything_once_where_rows_fill_the_device():
    cases = ("given_backward", "rnn_forward", "rnn_backward")
    rows = compiled("h100", *(f"gpu_{case}" for case in cases), "gpu_float32_backward")
    assert_one_kernel_and_least_bytes(rows)


@pytest.mark.slow
def test_a_long_row_on_h100_takes_two_kernels_and_reads_its_inputs_twice():
    forward, backward = compiled("h100", "gpu_long_forward", "gpu_long_backward")
    assert len(forward["kernels"]) == len(backward["kernels"]) == 2
    # Logits and values again: 4 of 6 bytes a channel; logits and states' gradient: 4 of
    # 12.
    assert forward["kernel_bytes"] < 1.68 * forward["least_bytes"]
    assert backward["kernel_bytes"] < 1.34 * backward["least_bytes"]


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
    read = [f"tpu_queried_{way}" for way in ("inference", "backward")]
    rows = compiled(target, *layers, "tpu_float32_backward", *read, "tpu_odd_backward")
    assert_one_kernel_and_least_bytes(rows[:-3])
    assert [len(row["kernels"]) for row in rows[-3:]] == [1, 1, 1]
    # Small operands are fetched to VMEM ahead of these kernels, which is counted too.
    for row in rows[-3:-1]:
        assert row["kernel_bytes"] < 1.04 * row["least_bytes"], row


PASSES = ("forward", "backward")
