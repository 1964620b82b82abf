"""The compiled GPU kernels against the definition: needs a GPU, skips aloud without.

JAX_PLATFORMS=cuda,cpu python -m pytest tests/pallas_kernels -k on_gpu
"""

import jax
import pytest

from pallas_kernels.gated_scan import BlockSizes, gated_scan, triton
from tests.pallas_kernels.gated_scan.scan_cases import Case, check
from tests.tolerances import assert_values_close

LINKED = BlockSizes(stretch=64, channels=32, unroll=4)
CASES = {
    "one position": Case(positions=1, widths=(64,)),
    "prime": Case(positions=37, widths=(256, 64), starts=True),
    "exact": Case(positions=64, chunk=16, widths=(256, 64)),
    "one more": Case(positions=65, chunk=16, widths=(256, 64), lengths=True),
    "odd chunks": Case(positions=301, chunk=7, widths=(192, 48), starts=True),
    "long chunks": Case(positions=1000, chunk=300, widths=(64,)),
    "long": Case(positions=4099, widths=(128, 64), lengths=True, starts=True),
    "many rows": Case(positions=129, batch=70, widths=(2048,)),
    "logits": Case(positions=65, chunk=16, widths=(256, 64), logits=True, lengths=True),
    "logits of documents": Case(
        positions=301, widths=(192, 48), logits=True, starts=True, dtype="bfloat16"
    ),
    "queries": Case(positions=64, chunk=16, widths=(256, 64), logits=True, head=32),
    "queries of wide heads": Case(
        positions=70, chunk=7, widths=(512, 256), starts=True, head=128
    ),
    "queries, bfloat16": Case(
        positions=128, chunk=16, widths=(256, 256), head=64, dtype="bfloat16"
    ),
    "bfloat16": Case(positions=129, chunk=16, widths=(256, 64), dtype="bfloat16"),
    "bfloat16, long": Case(positions=4096, widths=(256,), dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, found {jax.default_backend()}")


@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_agree_with_the_definition_on_gpu(name):
    check(triton, CASES[name])


def test_forced_blocks_agree_with_the_definition_on_gpu():
    check(triton, Case(positions=1001, widths=(256, 64), lengths=True), blocks=LINKED)


def test_the_op_picks_the_kernels_on_gpu_and_leaves_one_position_to_xla():
    gate, values, initial, *_ = CASES["exact"].inputs()
    picked = gated_scan(gate, values, initial=initial, chunk=16)
    named = gated_scan(gate, values, initial=initial, chunk=16, implementation="triton")
    assert_values_close(picked, named)
    first = tuple(v[:, :1] for v in values)
    assert gated_scan(gate[:, :1], first, initial=initial).states[0].shape[1] == 1
