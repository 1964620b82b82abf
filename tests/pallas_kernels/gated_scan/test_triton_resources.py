"""The GPU kernels fit the registers of each generation of GPUs at the paper's sizes."""

import pytest

from tests.absent_compilers import COMPILERS
from tests.triton_resources import resources_of

CASES = "tests.pallas_kernels.gated_scan.compile_cases"
SLOW = [
    ("8.0", "rat_backward"),
    ("8.6", "queried_forward"),
    ("9.0", "queried_backward"),
    ("9.0", "rnn_backward"),
    ("9.0", "sixteen_tiles_backward"),
]
EVERY = [
    (capability, f"{layer}_{way}")
    for capability in ("8.0", "8.6", "8.9", "9.0", "12.0")
    for layer in ("rnn", "rat", "queried", "sixteen_tiles")
    for way in ("forward", "backward")
]


@pytest.mark.parametrize(
    "capability, case",
    [
        pytest.param(*one, marks=pytest.mark.slow if one in SLOW else pytest.mark.sweep)
        for one in EVERY
    ],
)
def test_a_kernel_spills_nothing(capability, case):
    if not (COMPILERS / "triton").is_dir():
        pytest.skip("no Triton here: run make compilers")
    (kernel,) = resources_of(capability, f"{CASES}:gpu_{case}")
    assert kernel["stack"] == 0, kernel
    # Programs are one warp: what they share is parts of sums over a head's channels.
    assert kernel["shared"] <= 128, kernel
