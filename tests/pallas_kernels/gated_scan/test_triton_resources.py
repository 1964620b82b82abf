"""The GPU kernels fit the registers of each generation of GPUs at the paper's sizes."""

import pytest

from tests.absent_compilers import COMPILERS
from tests.triton_resources import resources_of

CASES = "tests.pallas_kernels.gated_scan.compile_cases"
PASSES = [
    f"{layer}_{way}"
    for layer in (
        *("rnn", "rat", "queried", "sixteen_tiles", "given", "ragged"),
        *("long", "long_ragged"),
    )
    for way in ("forward", "backward")
]
SLOW = [("8.6", "queried_backward"), ("9.0", "rat_backward")]
EVERY = [
    (capability, case)
    for capability in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
    for case in (*PASSES, "float32_backward")
]


@pytest.mark.parametrize(
    "capability, case",
    [
        pytest.param(*one, marks=pytest.mark.slow if one in SLOW else pytest.mark.sweep)
        for one in EVERY
    ],
)
def test_kernels_spill_nothing(capability, case):
    if not (COMPILERS / "jax_triton").is_dir():
        pytest.skip("no jax-triton here: run make compilers")
    kernels = resources_of(capability, f"{CASES}:gpu_{case}")
    assert len(kernels) == 1 + case.startswith("long")
    for kernel in kernels:
        assert kernel["stack"] == kernel["shared"] == 0, kernel
        # At least 12 warps on a multiprocessor's 65,536 registers.
        assert kernel["registers"] <= 168, kernel
