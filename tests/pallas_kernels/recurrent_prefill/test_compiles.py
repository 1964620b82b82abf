"""The kernels compile for H100, v5e, v5p and v6e, without them."""

import pytest

from tests.absent_compilers import COMPILERS, ask
from tests.marks import slow_except

CASES = "tests.pallas_kernels.recurrent_prefill.compile_cases"
MOST_KERNELS = 6
TRITON = "__gpu$xla.gpu.triton"


@pytest.fixture(autouse=True)
def compilers():
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")


def compiled(target: str, case: str) -> dict:
    """Returns the summary of a case."""
    return ask(target, "tests.compile_target:summary_of", f"{CASES}:{case}")


def positions_loops(summary: dict) -> list[list[str]]:
    """Returns what the innermost loops with kernels of ours launch an iteration."""
    return [
        loop["launched"]
        for loop in summary["loops"]
        if loop["loops"] == 0 and sum(TRITON in name for name in loop["launched"]) > 1
    ]


@pytest.mark.parametrize(
    "case",
    slow_except(
        (), ["gpu_forward", "gpu_small_batch", "gpu_wavefront"], slow=["gpu_forward"]
    ),
)
def test_a_position_forward_on_h100_takes_at_most_6_kernels(case):
    (launched,) = positions_loops(compiled("h100", case))
    assert sum(TRITON in name for name in launched) == 5
    assert len(launched) <= MOST_KERNELS, launched


@pytest.mark.slow
def test_a_position_backward_on_h100_takes_at_most_9_kernels():
    # In the text of a program loops come in any order.
    loops = positions_loops(compiled("h100", "gpu_training"))
    forward, backward = sorted(loops, key=len)
    assert len(forward) <= MOST_KERNELS, forward
    assert sum(TRITON in name for name in backward) == 7
    assert len(backward) <= 9, backward


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
def test_a_whole_layer_compiles_into_one_kernel_for(target):
    summary = compiled(target, "tpu_forward")
    assert "tpu_custom_call" in summary["custom_calls"]
    assert summary["loops"] == []


@pytest.mark.parametrize(
    ("target", "case"),
    [
        # At the paper's width where there is least VMEM.
        pytest.param("v5p:2x2x1", "tpu_training", marks=pytest.mark.sweep),
        # With as many rows as a program may have.
        pytest.param("v5e:2x2", "tpu_large_training", marks=pytest.mark.sweep),
        # Of a width that leaves a program few rows.
        pytest.param("v5e:2x2", "tpu_wide_training", marks=pytest.mark.sweep),
        pytest.param("v5e:2x2", "tpu_narrow_training", marks=pytest.mark.slow),
        pytest.param("v5e:2x2", "tpu_documents", marks=pytest.mark.sweep),
        pytest.param("v5e:2x2", "tpu_rotated", marks=pytest.mark.sweep),
        pytest.param("v5p:2x2x1", "tpu_rotated", marks=pytest.mark.sweep),
        pytest.param("v6e:2x2", "tpu_rotated", marks=pytest.mark.sweep),
        pytest.param("v5p:2x2x1", "tpu_documents", marks=pytest.mark.sweep),
        pytest.param("v6e:2x2", "tpu_documents", marks=pytest.mark.sweep),
        pytest.param("v6e:2x2", "tpu_narrow_training", marks=pytest.mark.sweep),
        pytest.param("v6e:2x2", "tpu_training", marks=pytest.mark.sweep),
    ],
)
def test_training_compiles_for(target, case):
    summary = compiled(target, case)
    assert "tpu_custom_call" in summary["custom_calls"]


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_cache_to_fill_compiles_for(target):
    summary = compiled(target, "tpu_cache")
    assert "tpu_custom_call" in summary["custom_calls"]


@pytest.mark.slow
def test_heads_that_do_not_divide_a_register_s_lanes_compile_for_v5e():
    summary = compiled("v5e:2x2", "tpu_heads_of_40")
    assert "tpu_custom_call" in summary["custom_calls"]
