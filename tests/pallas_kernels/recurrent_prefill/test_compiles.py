"""The kernels compile for H100, v5e, v5p and v6e, without them."""

import json
import os
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

COMPILERS = ROOT / ".compilers"
CASES = "tests.pallas_kernels.recurrent_prefill.compile_cases"
MOST_KERNELS = 8
TRITON = "__gpu$xla.gpu.triton"


@pytest.fixture(autouse=True)
def compilers():
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")


def compiled(target: str, case: str) -> dict:
    """Returns the summary that the child process prints."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.compile_target", target, f"{CASES}:{case}"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(COMPILERS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


def positions_loops(summary: dict) -> list[list[str]]:
    """Returns what the innermost loops with kernels of ours launch an iteration."""
    return [
        loop["launched"]
        for loop in summary["loops"]
        if loop["loops"] == 0 and sum(TRITON in name for name in loop["launched"]) > 1
    ]


SLOW = [
    pytest.param(case, marks=pytest.mark.slow)
    for case in ("gpu_small_batch", "gpu_wavefront")
]


@pytest.mark.parametrize("case", ["gpu_forward", *SLOW])
def test_a_position_forward_on_h100_takes_at_most_8_kernels(case):
    (launched,) = positions_loops(compiled("h100", case))
    assert sum(TRITON in name for name in launched) == 5
    assert len(launched) <= MOST_KERNELS, launched


@pytest.mark.slow
def test_a_position_backward_on_h100_takes_at_most_9_kernels():
    forward, backward = positions_loops(compiled("h100", "gpu_training"))
    assert len(forward) <= MOST_KERNELS, forward
    assert sum(TRITON in name for name in backward) == 7
    assert len(backward) <= 9, backward


def test_a_whole_layer_compiles_into_one_kernel_for_v5e():
    summary = compiled("v5e:2x2", "tpu_forward")
    assert "tpu_custom_call" in summary["custom_calls"]
    assert summary["loops"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "case"),
    [
        # At the paper's width where there is least VMEM.
        ("v5p:2x2x1", "tpu_training"),
        ("v5e:2x2", "tpu_narrow_training"),
        ("v6e:2x2", "tpu_narrow_training"),
    ],
)
def test_training_compiles_for(target, case):
    summary = compiled(target, case)
    assert "tpu_custom_call" in summary["custom_calls"]


@pytest.mark.slow
def test_a_whole_layer_compiles_into_one_kernel_for_v6e():
    summary = compiled("v6e:2x2", "tpu_forward")
    assert "tpu_custom_call" in summary["custom_calls"]
    assert summary["loops"] == []


@pytest.mark.slow
def test_heads_that_do_not_divide_a_register_s_lanes_compile_for_v5e():
    summary = compiled("v5e:2x2", "tpu_heads_of_40")
    assert "tpu_custom_call" in summary["custom_calls"]
