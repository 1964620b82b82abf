"""The backward loop of the Pallas backends, tiles in reverse.

A step takes one tile of each of L layers, layer l a tile behind layer l - 1 as in the
forward loop, from the last tile to the first. The tile's keys first meet the queries of
later tiles; then the backend's kernels run through its positions in reverse; then the
weights' gradients are formed for the whole tile, and the cotangent of x.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import Prepared
from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.tiles.gradients import (
    query_gradients_of,
    recompute,
    sequential_gradients,
)
from pallas_kernels.recurrent_prefill.tiles.inputs import queries_and_pairs


class LaterQueries(NamedTuple):
    """Queries whose backward is done, by row; n tiles of b positions.

    Attributes:
      q: [L, B, T, H E].
      for_attended: do, [L, B, T, H E].
      log_normalizer: [L, B, H, T].
      delta: [L, B, H, T].
    """

    q: jax.Array
    for_attended: jax.Array
    log_normalizer: jax.Array
    delta: jax.Array


class QueryGradients(NamedTuple):
    """Cotangents of a tile's queries and, by query head, of its temporary pairs."""

    q: jax.Array
    own_k: jax.Array
    own_v: jax.Array
    delta: jax.Array


class Kernels(NamedTuple):
    """The parts of the loop that a backend brings.

    Attributes:
      meet_later_queries: (keys, values [L, b, B, K E], later, first, at) -> dk, dv in
        float32: of b keys from the queries at index `first` and later, int32 [L, B], a
        multiple of the tile; `at` is the index of key 0 among the queries' positions,
        and keys at `first` or beyond count for nothing.
      positions: (tile, w, known, q, dk, dv) -> what the loop through a tile's positions
        found, and the cotangent of what they attended to, [L, b, B, H E].
      query_gradients: (queries, own_k, own_v, keys, values, before) -> cotangents of a
        tile's queries (q, cotangent of attended, attended [L, b, B, H E] and
        log_normalizer [L, b, H, B]); keys [L, B, S, K E] hold the tile's own too, from
        slot `before` on, int32 [L, B].
    """

    meet_later_queries: Callable
    positions: Callable
    query_gradients: Callable


class Kept(NamedTuple):
    """What the forward pass kept, and its cotangents, T whole tiles, positions first.

    Attributes:
      x: input of each layer, [L, T, B, D].
      z: output of each layer, [L, T, B, D].
      attended: [L, T, B, H E].
      log_normalizer: [L, T, H, B].
      for_z: of the last layer's output, [T, B, D].
      for_keys, for_values: of the persistent pairs, [L, T, B, K E], or None.
    """

    x: Array
    z: Array
    attended: Array
    log_normalizer: Array
    for_z: Array
    for_keys: Array | None
    for_values: Array | None


class Gradients(NamedTuple):
    """Cotangents of x [T, B, D] and weights, and the queries of all positions."""

    x: Array
    weights: Prepared
    queries: LaterQueries


def run_layers_back(
    kernels: Kernels,
    kept: Kept,
    w: Prepared,
    keys: Array,
    values: Array,
    start: Array,
    *,
    spec: LayerSpec,
    tile: int,
) -> Gradients:
    """Runs all layers of `w` back at once.

    Args:
      keys, values: [L, B, S, K E], with the pairs of these T positions in their slots.
      start: how many positions each row had seen, [B].
    """
    b = tile
    L, T, B, D = kept.x.shape
    n, HE = T // b, kept.attended.shape[-1]
    tiles = lambda rows: rows.reshape(L, n, b, *rows.shape[2:])  # noqa: E731
    of_tiles = jax.tree.map(tiles, kept._replace(for_z=None))
    for_z = kept.for_z.reshape(n, b, B, D)
    later = LaterQueries(
        q=jnp.zeros((L, B, T, HE), spec.dtype),
        for_attended=jnp.zeros((L, B, T, HE), spec.dtype),
        log_normalizer=jnp.zeros((L, B, spec.heads, T), jnp.float32),
        delta=jnp.zeros((L, B, spec.heads, T), jnp.float32),
    )
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)

    def step(carry, j):
        above, later, total = carry
        index = j - jnp.arange(L)
        active = (index >= 0) & (index < n)
        place = jnp.clip(index, 0, n - 1)
        rows = jax.tree.map(lambda part: part[jnp.arange(L), place], of_tiles)
        incoming = jnp.concatenate([above[1:], for_z[place[-1]][None]])
        incoming = jnp.where(active[:, None, None, None], incoming, 0.0)
        for_x, gradients, queries = _run_tile_back(
            *(kernels, rows._replace(for_z=incoming), w, keys, values),
            *(start + (place * b)[:, None], later, place * b, active, spec),
        )
        total = jax.tree.map(jnp.add, total, gradients)
        later = _append(later, queries, jnp.where(active, place, n))
        return (for_x, later, total), for_x[0]

    above = jnp.zeros((L, b, B, D), jnp.float32)
    (_, later, total), for_x = jax.lax.scan(
        step, (above, later, total), jnp.arange(n + L - 1), reverse=True
    )
    return Gradients(for_x[:n].reshape(T, B, D), total, later)


def _run_tile_back(
    kernels, tile: Kept, w, keys, values, before, later, first, active, spec
):
    """Runs one tile back; returns cotangents of x and weights, and its queries."""
    L, b, B, _ = tile.x.shape
    q, own_k, own_v = queries_and_pairs(tile.x, w, spec)
    known = recompute(tile.x, tile.z, tile.attended, w, spec)
    rows = lambda per_layer: jnp.broadcast_to(  # noqa: E731
        per_layer[:, None], (L, B)
    ).astype(jnp.int32)
    for_k, for_v = kernels.meet_later_queries(
        known.keys, known.values, later, rows(first + b), rows(first)
    )
    if tile.for_keys is not None and tile.for_values is not None:
        for_k, for_v = for_k + tile.for_keys, for_v + tile.for_values
    for_k, for_v = (
        jnp.where(active[:, None, None, None], part, 0.0) for part in (for_k, for_v)
    )
    found, for_attended = kernels.positions(tile, w, known, q, for_k, for_v)
    queries = (q, for_attended, tile.attended, tile.log_normalizer)
    of_queries = kernels.query_gradients(
        queries, own_k, own_v, keys, values, before.astype(jnp.int32)
    )
    groups = (L, b, B, spec.key_heads, -1, spec.head_width)
    for_own_k, for_own_v = (
        part.reshape(groups).sum(axis=4).reshape(own_k.shape)
        for part in (of_queries.own_k, of_queries.own_v)
    )
    for_x, of_projection = query_gradients_of(
        tile.x, of_queries.q, for_own_k, for_own_v, w, spec
    )
    gradients = sequential_gradients(known, tile.attended, found, w, spec)
    gradients = jax.tree.map(jnp.add, gradients, of_projection)
    done = LaterQueries(q, for_attended, tile.log_normalizer, of_queries.delta)
    return found.y + for_x, gradients, done


def _append(later: LaterQueries, tile: LaterQueries, index: Array) -> LaterQueries:
    """Puts a tile's queries [L, b, B, ...] into their place; index n is dropped."""
    L, b, B, HE = tile.q.shape
    layers = jnp.arange(L)

    def rows(old: Array, new: Array) -> Array:
        split = old.reshape(L, B, -1, b, HE)
        split = split.at[layers, :, index].set(new.swapaxes(1, 2), mode="drop")
        return split.reshape(old.shape)

    def scalars(old: Array, new: Array) -> Array:
        split = old.reshape(*old.shape[:3], -1, b)
        split = split.at[layers, :, :, index].set(
            jnp.transpose(new, (0, 3, 2, 1)), mode="drop"
        )
        return split.reshape(old.shape)

    return LaterQueries(
        rows(later.q, tile.q),
        rows(later.for_attended, tile.for_attended),
        scalars(later.log_normalizer, tile.log_normalizer),
        scalars(later.delta, tile.delta),
    )
