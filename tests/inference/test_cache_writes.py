"""What new tokens write into a cache: every place once, so that no order is needed.

XLA for GPUs sorts the places of a scatter whose order could matter, with all that is
written there, where a run is to be deterministic.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.layers.attention import dropped_slots
from recurjax.types import LoopPositions, Tokens
from tests.compiling import scatters
from tests.inference.conftest import build
from tests.inference.engine.models import LENGTH
from tests.inference.engine.test_depth import OWN
from tests.inference.test_compute_dtype import STACKS
from tests.variants.relaxed_recursive_transformer import switches

OF_A_CACHE = 4
"""Axes: a layer's, a row's, a slot's, and what a slot holds."""


def written_to_caches(function, *arguments) -> list[bool]:
    """Returns of each scatter into a cache whether its places are said to be unique."""
    return [
        equation.params["unique_indices"]
        for equation in scatters(jax.make_jaxpr(function)(*arguments).jaxpr)
        if equation.invars[0].aval.ndim >= OF_A_CACHE
    ]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", STACKS)
def test_places_of_new_tokens_are_known_to_be_unique(name, rows, tokens):
    model = build(stack=STACKS[name], dtype="float32")
    cache = model.init_cache(rows, 16, "float32")
    ids = jnp.zeros((rows, tokens), jnp.int32)
    lengths = jnp.full(rows, tokens - 1) if tokens > 1 else None
    result = written_to_caches(
        lambda ids, cache: model(Tokens(ids, lengths=lengths), cache), ids, cache
    )
    assert result and all(result)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_places_of_a_tick_are_known_to_be_unique(rows, lanes):
    stack = switches.build(OWN).stack
    at = LoopPositions(
        loop=jnp.broadcast_to(jnp.arange(lanes), (rows, lanes)),
        position=jnp.zeros((rows, lanes), jnp.int32),
        live=jnp.zeros((rows, lanes), bool),
    )
    x = jnp.zeros((rows, lanes, stack.config.width))
    cache = stack.init_ticks(rows, LENGTH, jnp.float32)
    tick = partial(stack.tick, weights=stack.tick_weights())
    result = written_to_caches(lambda x, cache: tick(x, at, cache), x, cache)
    assert result and all(result)


def test_dropped_tokens_have_places_of_their_own_out_of_range():
    slots = np.asarray(dropped_slots(5, 4))
    assert len(set(slots)) == 4 and slots.min() >= 5
