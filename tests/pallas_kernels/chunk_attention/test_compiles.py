"""The kernels compile at the paper's sizes for an H100 and a v5e that are not here."""

import pytest

from tests.absent_compilers import COMPILERS, ask

TRAFFIC = "tests.pallas_kernels.chunk_attention.traffic:traffic"


@pytest.fixture(autouse=True)
def compilers():
    if not (COMPILERS / "jax_plugins").is_dir():
        pytest.skip("no compilers for GPU and TPU here: run make compilers")


def compiled(target: str, *cases: str) -> list[tuple[int, float]]:
    """Returns each case's launches, and its bytes over the bound."""
    rows = (ask(target, TRAFFIC, case) for case in cases)
    return [
        (len(row["launched"]), round(row["bytes"] / row["bound"], 2)) for row in rows
    ]


def test_both_passes_take_three_kernels_on_h100():
    ((launched, share),) = compiled("h100", "gpu_training")
    # Without a copy: the passes share inputs, and o, do and q are read in both.
    assert launched == 3
    assert share < 1.8


@pytest.mark.slow
def test_a_forward_pass_or_a_decode_step_is_one_kernel_on_h100():
    forward, decode = compiled("h100", "gpu_forward", "gpu_decode")
    assert forward == (1, 1.01)
    assert decode == (1, 1.0)


@pytest.mark.slow
def test_one_row_s_decode_step_writes_no_weighted_values_on_h100():
    """Left to itself XLA moves three times the bound, in as many launches."""
    ((launched, share),) = compiled("h100", "gpu_decode_one_row")
    assert launched == 6
    assert share < 1.1


@pytest.mark.slow
def test_small_batches_share_a_group_s_heads_out_at_one_kernel_more():
    ((launched, _),) = compiled("h100", "gpu_small_batch")
    assert launched == 4


@pytest.mark.parametrize(
    "target",
    [  # The other ops' kernels meet the other TPUs.
        pytest.param("v5e:2x2", marks=pytest.mark.slow),
        pytest.param("v5p:2x2x1", marks=pytest.mark.sweep),
        pytest.param("v6e:2x2", marks=pytest.mark.sweep),
    ],
)
def test_all_passes_compile_for_tpus(target):
    cases = ("tpu_forward", "tpu_training", "tpu_decode")
    forward, training, decode = compiled(target, *cases)
    # Ends in full registers are read in place: XLA copies next to nothing.
    assert forward[1] < 1.05 and training[1] < 1.95 and decode[1] < 1.1
    assert forward[0] <= 3 and training[0] <= 8
