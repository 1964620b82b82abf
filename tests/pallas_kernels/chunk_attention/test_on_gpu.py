"""The compiled GPU kernels against the reference: needs a GPU, skips aloud without.

JAX_PLATFORMS=cuda,cpu python -m pytest tests/pallas_kernels -k on_gpu
"""

from functools import partial

import jax
import pytest

from pallas_kernels.chunk_attention import chunk_attention
from tests.pallas_kernels.chunk_attention.cases import (
    Case,
    assert_is_the_definition,
    op_passes,
)

CASES = {
    "two positions": Case(2),
    "prime": Case(1031, chunk=16, width=64),
    "whole blocks": Case(512, chunk=16, groups=1, width=128),
    "a chunk longer than a block": Case(700, chunk=200, width=32),
    "chunks of one": Case(300, chunk=1),
    "cached ends": Case(130, chunk=16, ends=70, first=(61, 0), width=64),
    "few positions": Case(3, chunk=1, ends=256, first=(253, 2), width=64),
    "documents": Case(517, chunk=16, documents=True, width=64),
    "no ends": Case(7, ends=0, first=(2, 0)),
    "wide heads": Case(517, chunk=16, width=256),
    "bfloat16": Case(1031, chunk=16, width=128, dtype="bfloat16"),
    "many rows": Case(517, chunk=16, batch=40, width=64, dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, found {jax.default_backend()}")


@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_agree_with_the_reference_on_gpu(name):
    def passes(case, arrays):
        call = partial(chunk_attention, implementation="triton")
        return op_passes(call, case, arrays)

    with jax.default_matmul_precision("highest"):
        assert_is_the_definition(passes, CASES[name])
