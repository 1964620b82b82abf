"""A refinement computes its own positions only: FLOPs traced, and as compiled."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from recurjax.plan.flops import count_flops
from recurjax.types import Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerStack,
)
from recurjax.variants.latent_recurrent_transformer.presets import nanochat, shared
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    strided_partition,
)
from tests.compiling import QUICK_COMPILE

# Shorter than what a CPU attends to in blocks: those skip hidden keys in a full pass.
T = 48
CONFIG = nanochat(
    4, width=64, head_width=32, vocabulary=16, length=T, memory=shared(4), unroll=4
)


def product_flops(function, *inputs) -> int:
    jaxpr = jax.make_jaxpr(function)(*inputs)
    return count_flops(jaxpr, platform="tpu").products


def arguments():
    """Shapes only; unrolled, so that the compiler's own count has no loops to miss."""
    stack = jax.eval_shape(
        lambda: LatentRecurrentTransformerStack(CONFIG, rngs=nnx.Rngs(0))
    )
    x = jax.ShapeDtypeStruct((1, T, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    return stack, x, ids


def initial(stack, x, ids):
    return stack.initial(x, Tokens(ids))


def refinement(positions):
    def refine(stack, x, ids, buffer):
        return stack.refine(x, Tokens(ids), positions, buffer)

    return refine


@pytest.mark.parametrize("subsets", [1, 2, 4, 8])
def test_s_refinements_cost_about_one_pass(subsets):
    given = arguments()
    _, buffer = jax.eval_shape(initial, *given)
    whole = product_flops(initial, *given)
    parts = [
        product_flops(refinement(positions), *given, buffer)
        for positions in strided_partition(T, subsets)[:: max(subsets - 1, 1)]
    ]  # the first and the last
    # Only W_rec m is added: 4 D^2 of 4 (24 D^2 + 4 D T) FLOPs a token.
    added = 4 * 64**2 * T
    assert set(parts) == {(whole + added) // subsets}
    assert added < 0.04 * whole


@pytest.mark.slow
@pytest.mark.parametrize("subsets", [2, 8])
def test_the_compiled_program_does_no_more(subsets):
    given = arguments()
    _, buffer = jax.eval_shape(initial, *given)

    def counted(function, *inputs):
        compiled = jax.jit(function, compiler_options=QUICK_COMPILE).lower(*inputs)
        return compiled.compile().cost_analysis()["flops"]

    whole = counted(initial, *given)
    assert whole > product_flops(initial, *given)  # it counts sums and products too
    part = counted(refinement(slice(1, None, subsets)), *given, buffer)
    assert part * subsets < 1.1 * whole
