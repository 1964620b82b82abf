"""The GPU kernels in interpret mode against the definition."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunk_attention import BlockSizes, triton
from pallas_kernels.chunk_attention.triton_backward import (
    end_gradients,
    position_gradients,
)
from pallas_kernels.chunk_attention.triton_forward import attend
from pallas_kernels.chunk_attention.triton_launch import Launch, choose_tiles
from pallas_kernels.chunk_attention.visibility import cdiv
from recurjax.plan.flops import count_flops
from tests.pallas_kernels.chunk_attention.cases import (
    Case,
    assert_is_the_definition,
    backend_passes,
    refusal,
)

BLOCKS = BlockSizes(
    block_q=16, block_k=4, backward_block_q=8, backward_block_k=4, splits=1
)
"""Several blocks along each axis; a block of positions spans several chunks."""
KERNELS = partial(backend_passes, triton, interpret=True, blocks=BLOCKS)


@pytest.mark.slow
def test_heads_of_a_group_shared_out_give_the_same_gradient():
    blocks = dataclasses.replace(BLOCKS, splits=2)
    passes = partial(backend_passes, triton, interpret=True, blocks=blocks)
    assert_is_the_definition(passes, Case(37))


@pytest.mark.sweep
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


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_launch_tells_the_products_of_all_its_programs(chunk):
    """Their loops end where causality does: no count of a body's products knows."""
    batch, length, heads, groups, width = 2, 37, 4, 2, 16
    count = cdiv(length, chunk)
    case = Case(
        length,
        groups=groups,
        chunk=chunk,
        ends=count,
        width=width,
        batch=batch,
        heads=heads,
    )
    call = case.call(interpret=True, blocks=BLOCKS)
    own = jax.ShapeDtypeStruct((batch, length, heads, width), jnp.float32)
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)

    def products(function, *arrays) -> int:
        run = partial(function, Launch.of(call), call)
        return count_flops(jax.make_jaxpr(run)(*arrays), platform="cuda").products

    def computed(rows: int, ends: int) -> int:
        """Pairs in blocks of which any position sees any end."""
        blocks = [
            (i, j)
            for i in range(0, length, rows)
            for j in range(0, count, ends)
            if any(j < t // chunk for t in range(i, min(i + rows, length)))
        ]
        return len(blocks) * rows * ends * batch * heads

    forward = products(attend)
    assert forward == 2 * 2 * width * computed(BLOCKS.block_q, BLOCKS.block_k)
    positions = products(position_gradients, own, lse, own)
    assert positions == 3 * 2 * width * computed(BLOCKS.block_q, BLOCKS.block_k)
    ends = products(end_gradients, lse, lse, own)
    rows, at_once = BLOCKS.backward_block_q, BLOCKS.backward_block_k
    assert ends == 4 * 2 * width * computed(rows, at_once)


def test_what_the_kernels_cannot_do_is_refused_with_a_reason():
    assert refusal(triton, Case(1)) is None
    assert "head width must be a power of two" in str(
        refusal(triton, Case(1, width=24))
    )
    assert "16 to 256, got 512" in str(refusal(triton, Case(1, width=512)))
    half = Case(1, dtype="int8")
    assert "bfloat16 and float16, got q of int8" in str(refusal(triton, half))
