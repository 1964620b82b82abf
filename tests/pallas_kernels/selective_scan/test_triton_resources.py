"""The GPU kernels at the paper's sizes keep to their registers."""

import pytest

from tests.triton_resources import COMPILER, resources_of

CASES = "tests.pallas_kernels.selective_scan.compile_cases"


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, way, warps, stack",
    [("9.0", "forward", 1, 0), ("9.0", "backward", 8, 0), ("8.0", "backward", 8, 16)],
)
def test_a_kernel_spills_no_more_than_is_told(capability, way, warps, stack):
    if not (COMPILER / "triton").is_dir():
        pytest.skip("no Triton here: run make triton")
    (kernel,) = resources_of(capability, f"{CASES}:gpu_{way}")
    assert kernel["warps"] == warps and kernel["stack"] <= stack, kernel
