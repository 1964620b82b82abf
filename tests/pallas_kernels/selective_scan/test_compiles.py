"""The kernels compile for an H100 and TPUs that are not here, and move little."""

from functools import partial

import pytest

from tests.pallas_kernels import moved_table

compiled = partial(moved_table.compiled, "selective_scan")
MOST = 1.3
"""Bytes of a call over those of its inputs and outputs."""


@pytest.fixture(autouse=True)
def compilers():
    if not (moved_table.COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")


def assert_one_kernel_and_few_bytes(rows: list[dict]) -> None:
    for row in rows:
        assert len(row["kernels"]) == 1, row
        moved = row["kernel_bytes"] + row["other_bytes"]
        assert moved < MOST * row["least_bytes"], row


def test_a_forward_pass_on_h100_is_one_kernel():
    assert_one_kernel_and_few_bytes(compiled("h100", "gpu_training"))


@pytest.mark.slow
def test_each_pass_on_h100_is_one_kernel():
    cases = ("gpu_forward", "gpu_backward", "gpu_float32_backward", "gpu_long_forward")
    assert_one_kernel_and_few_bytes(compiled("h100", *cases))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_each_pass_on_tpu_is_one_kernel(target):
    cases = ("tpu_forward", "tpu_training", "tpu_backward", "tpu_float32_backward")
    rows = compiled(target, *cases, "tpu_odd_backward")
    assert_one_kernel_and_few_bytes(rows[:-1])
    assert len(rows[-1]["kernels"]) == 1  # T and I are padded: copies
