"""The GPU kernels in interpret mode against the definition."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from pallas_kernels.chunk_attention import triton
from pallas_kernels.chunk_attention.triton_launch import Tiles, choose_tiles
from tests.pallas_kernels.chunk_attention.cases import (
    Case,
    assert_is_the_definition,
    backend_passes,
    refusal,
)

TILES = Tiles(block_q=16, block_k=4, backward_block_q=8, backward_block_k=4, splits=1)
"""Several blocks along each axis; a block of positions spans several chunks."""
KERNELS = partial(backend_passes, triton, interpret=True, tiles=TILES)


@pytest.mark.slow
def test_heads_of_a_group_shared_out_give_the_same_gradient():
    tiles = dataclasses.replace(TILES, splits=2)
    passes = partial(backend_passes, triton, interpret=True, tiles=tiles)
    assert_is_the_definition(passes, Case(37))


@pytest.mark.slow
def test_gradients_are_finite_differences():
    """The trap: a merge through a library's lse-sum-exp has a wrong gradient."""
    case = Case(7, batch=1, heads=2, groups=1)
    arrays = case.inputs()[0]
    gradients = KERNELS(case, arrays)[1]
    draw = np.random.default_rng(1)
    aside = [draw.normal(size=x.shape).astype(np.float32) for x in arrays]
    step = 1e-2
    o = [
        np.asarray(
            KERNELS(
                case, [x + sign * step * d for x, d in zip(arrays, aside, strict=True)]
            )[0]
        )
        for sign in (1, -1)
    ]
    slope = np.sum((o[0] - o[1]) * case.weights()) / (2 * step)
    want = sum(np.sum(g * d) for g, d in zip(gradients, aside, strict=True))
    np.testing.assert_allclose(want, slope, rtol=2e-3)


def test_small_calls_share_a_group_s_heads_out():
    sizes = {"length": 4096, "heads": 16, "groups": 2, "width": 128, "wide": False}
    assert choose_tiles(batch=64, **sizes).splits == 1
    assert choose_tiles(batch=1, **sizes).splits == 4


def test_what_the_kernels_cannot_do_is_refused_with_a_reason():
    assert refusal(triton, Case(1)) is None
    assert "head width must be a power of two" in str(
        refusal(triton, Case(1, width=24))
    )
    assert "16 to 256, got 512" in str(refusal(triton, Case(1, width=512)))
    half = Case(1, dtype="int8")
    assert "bfloat16 and float16, got q of int8" in str(refusal(triton, half))
