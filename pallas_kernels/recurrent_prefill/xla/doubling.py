"""The paper's tiling: a finished stretch of keys serves as many queries ahead at once.

After tile t (from 1) with P = the largest power of two that divides t, the queries of
tiles t + 1 .. t + P meet the pairs of tiles t - P + 1 .. t. Each query meets each
earlier pair exactly once; N log N rows are read instead of N^2. Source: the Recurrent
Transformer paper, algorithm 1, with a tile in the place of a position.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.xla.attention import Running, logits_of, merge
from pallas_kernels.recurrent_prefill.xla.biases import HIDDEN, Placement, bias_of_slots
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry
from pallas_kernels.recurrent_prefill.xla.pairs import Pairs, cut


class Ahead(NamedTuple):
    """All queries of a layer, and what they have met so far, by slot."""

    q: Array
    running: Running


def nothing_met(q: Array, dtype) -> Ahead:
    """Starts queries [L, B, K, G, slots, E]."""
    zero = jnp.zeros(q.shape, dtype)
    return Ahead(q, Running(zero[..., 0] + HIDDEN, zero[..., 0], zero))


def met_so_far(ahead: Ahead, own: Running, j, geometry: Geometry) -> Running:
    """Joins what tile j's queries met before with their own units' pairs."""
    read = partial(_read, start=j * geometry.tile, size=geometry.tile)
    before = jax.tree.map(read, ahead.running)
    largest = jnp.maximum(before.largest, own.largest)
    shares = [jnp.exp(part.largest - largest) for part in (before, own)]
    return Running(
        largest,
        before.normalizer * shares[0] + own.normalizer * shares[1],
        before.weighted * shares[0][..., None] + own.weighted * shares[1][..., None],
    )


def look_ahead(
    ahead: Ahead,
    buffers: Pairs,
    place: Placement,
    j,
    geometry: Geometry,
    spec: LayerSpec,
) -> Ahead:
    """Lets the queries ahead meet the tiles that tile j completes."""
    levels = (geometry.slots // geometry.tile).bit_length() - 1
    done = j + 1
    level = jnp.minimum(jax.lax.population_count(~done & (done - 1)), levels)
    meet = [partial(_meet, 2**i, place, geometry, spec) for i in range(levels)]
    running = jax.lax.switch(
        level, [*meet, lambda ahead, *_: ahead.running], ahead, buffers, done
    )
    return Ahead(ahead.q, running)


def _meet(count, place, geometry, spec, ahead: Ahead, buffers: Pairs, done) -> Running:
    """Lets `count` tiles of queries meet the `count` tiles before tile `done`.

    In pieces of at most a chunk's length on either side, so that memory stays linear.
    """
    pieces = 1
    while count // pieces * geometry.tile > max(geometry.chunk, geometry.tile):
        pieces *= 2
    size, here = count // pieces * geometry.tile, done * geometry.tile
    every = jnp.ones((size, size), bool)

    def piece(index, running: Running) -> Running:
        of_queries = here + index // pieces * size
        of_keys = here - (1 + index % pieces) * size
        read = partial(_read, start=of_queries, size=size)
        k, v = cut(buffers, of_keys, size)
        part = jax.tree.map(read, running)
        offset = jnp.arange(size)
        bias = bias_of_slots(
            place, of_queries + offset, of_keys + offset, every, part.weighted.dtype
        )
        logits = logits_of(read(ahead.q), k, spec.logit_scale) + bias
        update = partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=of_queries, axis=4
        )
        return jax.tree.map(update, running, merge(part, logits, v, spec.dtype))

    return jax.lax.fori_loop(0, pieces * pieces, piece, ahead.running)


def _read(part: Array, *, start, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(part, start, size, axis=4)
