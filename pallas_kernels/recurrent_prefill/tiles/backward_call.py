"""A whole backward call on a backend's kernels: layouts, layers, cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerWeights,
    RecurrentCache,
    Residuals,
    Rows,
)
from pallas_kernels.recurrent_prefill.equations import prepare
from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.tiles.backward import (
    Kept,
    Kernels,
    LaterQueries,
    run_layers_back,
)
from pallas_kernels.recurrent_prefill.tiles.gradients import persistent
from pallas_kernels.recurrent_prefill.tiles.layout import (
    Layout,
    from_slots,
    put_in_slots,
)


class Inputs(NamedTuple):
    """What a backward call gets, see `api`."""

    x: Array
    weights: LayerWeights
    cache: RecurrentCache
    rows: Rows
    residuals: Residuals
    for_z: Array
    for_cache: RecurrentCache


def run_backward(
    inputs: Inputs, kernels: Kernels, layout: Layout, *, spec: LayerSpec, together: bool
) -> tuple[Array, LayerWeights, RecurrentCache]:
    """Returns the cotangents of x, weights and cache.

    Args:
      together: runs all layers in one loop, as a wavefront.
    """
    x, cache, rows = inputs.x, inputs.cache, inputs.rows
    B, T, _ = x.shape
    w = prepare(inputs.weights, spec.dtype)
    L = w.w_kv.shape[0]
    start = layout.start(cache)
    keys, values = layout.cached_slots(cache, T, spec)
    by_position = lambda part: layout.whole_tiles(  # noqa: E731
        part.swapaxes(-3, -2), time=-3 % part.ndim, batch=-2 % part.ndim
    )
    x_rows, for_z = (by_position(p.astype(jnp.float32)) for p in (x, inputs.for_z))
    of_pairs = _of_pairs(inputs.for_cache, cache, rows, T) if cache.slots else None

    def layers(for_z, x, w, residuals, keys, values, of_pairs):
        """Runs layers whose inputs are x [L, T, B, D] back."""
        count = x.shape[0]
        attended = residuals.attended
        z, attended = map(
            by_position, (residuals.z, attended.reshape(*attended.shape[:3], -1))
        )
        log_normalizer = layout.whole_tiles(
            jnp.transpose(residuals.log_normalizer, (0, 2, 3, 1)), time=1, batch=3
        )
        _, _, new_keys, new_values = persistent(z, w, spec)
        keys, values = put_in_slots(
            (keys, values),
            (new_keys, new_values),
            start,
            jnp.zeros(count, jnp.int32),
            jnp.ones(count, bool),
            T,
        )
        for_pairs = (None, None) if of_pairs is None else map(by_position, of_pairs)
        kept = Kept(x, z, attended, log_normalizer, for_z, *for_pairs)
        out = run_layers_back(
            *(kernels, kept, w, keys, values, start), spec=spec, tile=layout.tile
        )
        of_cache = None
        if cache.slots:
            meet = kernels.meet_later_queries
            of_cache = _of_slots(meet, keys, values, out.queries, start, layout.tile)
        return out.x, (out.weights, of_cache)

    if together or L == 1:
        below = by_position(inputs.residuals.z[:-1])
        stacked = jnp.concatenate([x_rows[None], below])
        for_x, (of_weights, of_cache) = layers(
            for_z, stacked, w, inputs.residuals, keys, values, of_pairs
        )
    else:

        def layer(for_z, inputs_of_layer):
            l, rest = inputs_of_layer
            below = by_position(inputs.residuals.z[jnp.maximum(l - 1, 0)])
            x = jnp.where(l == 0, x_rows, below)[None]
            for_x, out = layers(for_z, x, *jax.tree.map(lambda leaf: leaf[None], rest))
            return for_x, jax.tree.map(lambda leaf: leaf[0], out)

        for_x, (of_weights, of_cache) = jax.lax.scan(
            layer,
            for_z,
            (jnp.arange(L), (w, inputs.residuals, keys, values, of_pairs)),
            reverse=True,
        )
    for_x = for_x[:T, :B].swapaxes(0, 1).astype(x.dtype)
    _, back = jax.vjp(lambda weights: prepare(weights, jnp.float32), inputs.weights)
    (for_weights,) = back(of_weights)
    for_cache = _of_cache(cache, inputs.for_cache, of_cache, rows, T)
    return for_x, for_weights, for_cache


def _of_pairs(
    for_cache: RecurrentCache, cache: RecurrentCache, rows: Rows, T: int
) -> tuple[Array, Array]:
    """Returns the cache's cotangents of the new pairs, float32 [L, B, T, K E]."""
    at, real = _written(cache, rows, T)
    at = jnp.minimum(at, cache.slots - 1)

    def take(part: Array) -> Array:
        part = part.reshape(*part.shape[:3], -1).astype(jnp.float32)
        part = part[:, jnp.arange(at.shape[0])[:, None], at]
        return jnp.where(real[..., None], part, 0.0)

    return take(for_cache.keys), take(for_cache.values)


def _written(cache: RecurrentCache, rows: Rows, T: int) -> tuple[Array, Array]:
    """Returns the slots [B, T] that a call writes, and which of them it does write."""
    at = cache.position[:, None] + jnp.arange(T)
    count = T if rows.lengths is None else rows.lengths[:, None]
    return at, (jnp.arange(T) < count) & (at < cache.slots)


def _of_slots(
    meet: Callable, keys: Array, values: Array, queries: LaterQueries, start, b: int
) -> tuple[Array, Array]:
    """Returns what all queries say to the slots filled before the call."""
    L, B, S, _ = keys.shape
    first = jnp.zeros((L, B), jnp.int32)

    def tile(s):
        cut = lambda part: jax.lax.dynamic_slice_in_dim(part, s, b, axis=2)  # noqa: E731
        k, v = (cut(part).swapaxes(1, 2) for part in (keys, values))
        at = jnp.broadcast_to(s - start, (L, B)).astype(jnp.int32)
        return meet(k, v, queries, first, at)

    join = lambda part: part.transpose(1, 3, 0, 2, 4).reshape(L, B, S, -1)  # noqa: E731
    for_k, for_v = jax.lax.map(tile, jnp.arange(0, S, b))
    return join(for_k), join(for_v)


def _of_cache(
    cache: RecurrentCache,
    for_cache: RecurrentCache,
    of_slots: tuple[Array, Array] | None,
    rows: Rows,
    T: int,
) -> RecurrentCache:
    """Adds what passes through the slots that the call did not write."""
    zeros = jax.tree.map(jnp.zeros_like, cache)
    no_position = np.zeros(cache.position.shape, jax.dtypes.float0)
    zeros = zeros._replace(position=no_position)
    if of_slots is None:
        return zeros
    at, real = _written(cache, rows, T)
    at = jnp.where(real, at, cache.slots)
    batch = jnp.arange(at.shape[0])[:, None]

    def pass_through(through: Array, added: Array, old: Array) -> Array:
        through = through.at[:, batch, at].set(0, mode="drop")
        return through.astype(old.dtype) + from_slots(added, old)

    return zeros._replace(
        keys=pass_through(for_cache.keys, of_slots[0], cache.keys),
        values=pass_through(for_cache.values, of_slots[1], cache.values),
    )
