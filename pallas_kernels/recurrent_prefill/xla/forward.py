"""The forward loop of the XLA path: tiles of positions, all L layers of a step at once.

A step takes one tile of every layer. Its queries first attend to the prefix, in chunks,
and to the cache; then the recurrence runs through the tile's units, each over the units
before it in the tile only, by products of a few rows with a matrix; then the tile's
persistent pairs join the buffers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import reductions
from pallas_kernels.recurrent_prefill.call import Array, LayerSpec, RecurrentCache
from pallas_kernels.recurrent_prefill.equations import (
    FewRowsMatrices,
    PreparedWeights,
    activate,
    few_rows_linear,
    few_rows_matrices,
    persistent_source,
    pre_norm,
    rotation,
    transpose,
)
from pallas_kernels.recurrent_prefill.xla.attention import (
    Pairs,
    SoftmaxSoFar,
    Visibility,
    bias_of_cache,
    cached_pairs,
    cut,
    each,
    empty_pairs,
    finish,
    logits_of,
    merge,
    own_unit_bias,
    pairs_of,
    positions_of,
    prefix_bias,
    prefix_chunks,
    put,
    queries_and_pairs,
    step_slots,
    tile_bias,
)
from pallas_kernels.recurrent_prefill.xla.geometry import (
    Geometry,
    from_below,
    join_tiles,
    split_units,
    unskew,
    unskew_tiles,
)


class Outcome(NamedTuple):
    """The results of L layers, positions first.

    z [L, T, B, D], attended [L, T, B, H E], lse [L, T, B, H].
    """

    z: Array
    attended: Array
    lse: Array
    persistent: Pairs
    temporary: Pairs | None


def run_layers(
    x: Float[Array, "T B D"],
    w: PreparedWeights,
    cache: RecurrentCache,
    visibility: Visibility,
    *,
    geometry: Geometry,
    spec: LayerSpec,
) -> Outcome:
    """Runs x [positions, B, D] through all layers of `w`."""
    L, b = geometry.layers, geometry.tile
    B, D = x.shape[1:]
    # While the last layers finish, the first ones read zeros.
    late = jnp.zeros(((geometry.depth - 1) * b, B, D), x.dtype)
    tiles = jnp.concatenate([x, late]).reshape(-1, 1, b, B, D)
    past = cached_pairs(cache, spec)
    matrices = few_rows_matrices(w, transpose(w), rows=geometry.unit * B)
    keep_temporary = spec.block > 1 and cache.slots > 0

    def step(carry, inputs):
        below, buffers = carry
        j, tile = inputs
        # 1. Every layer takes what the one below made of this tile a step ago.
        tile = from_below(tile, below, geometry)
        positions = positions_of(visibility, step_slots(j, geometry), geometry)
        rotary = rotation(positions, spec, x.dtype)
        q, tile_pairs = queries_and_pairs(tile, w, rotary, spec)
        # 2. Softmax over everything that is known before the tile: the queries' own
        # temporary pairs, earlier tiles, the cache.
        running = _attend_own_unit(q, tile_pairs, visibility, j, geometry, spec)
        running = _attend_prefix(q, running, buffers, visibility, j, geometry, spec)
        if past is not None:
            bias = bias_of_cache(visibility, positions, cache, spec, x.dtype)
            logits = logits_of(q, past.keys, spec.logit_scale) + bias
            running = merge(running, logits, past.values, spec.dtype)
        # 3. The tile's units, one after the other; their pairs join the buffers.
        z, attended, lse, pairs = _recur(
            tile, q, running, rotary, w, matrices, visibility, j, geometry, spec
        )
        buffers = put(buffers, pairs, j * b)
        temporary = tile_pairs if keep_temporary else None
        return (z, buffers), (z, attended, lse, temporary)

    empty = empty_pairs(L, B, geometry.slots, spec, spec.dtype)
    below = jnp.zeros((L, b, B, D), x.dtype)
    (_, buffers), (z, attended, lse, temporary) = jax.lax.scan(
        step, (below, empty), (jnp.arange(geometry.steps), tiles)
    )
    if temporary is not None:
        temporary = each(
            temporary, lambda part, axis: unskew_tiles(part, geometry, axis=axis)
        )
    rows = (unskew_tiles(part, geometry, axis=1) for part in (z, attended, lse))
    persistent = each(buffers, lambda part, axis: unskew(part, geometry, axis=axis))
    return Outcome(*rows, persistent=persistent, temporary=temporary)


def _attend_own_unit(
    q, pairs: Pairs, visibility, j, geometry: Geometry, spec
) -> SoftmaxSoFar:
    """Starts with the temporary pairs of each query's own unit, up to itself."""
    U, u = geometry.units, geometry.unit
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # A unit is a block of c positions that attend to one another's temporary pairs;
    # units of a tile do not, so they are an axis of their own (w).
    grid = lambda rows: rows.reshape(*rows.shape[:-2], U, u, rows.shape[-1])  # noqa: E731
    q, k, v = grid(q), grid(jnp.swapaxes(pairs.keys, 3, 4)), grid(pairs.values)
    logits = jnp.einsum("lbkqwte,lbkwse->lbkqwts", q, k, preferred_element_type=dtype)
    logits = logits * spec.logit_scale + own_unit_bias(visibility, j, geometry, dtype)
    # A query's own pair is always seen, so no maximum is HIDDEN and no sum is 0.
    largest = reductions.largest(logits)
    p = jnp.exp(logits - largest[..., None])
    weighted = jnp.einsum(
        "lbkqwts,lbkwse->lbkqwte",
        p.astype(spec.dtype),
        v,
        preferred_element_type=dtype,
    )
    parts = SoftmaxSoFar(largest, jnp.sum(p, axis=-1), weighted)
    flat = lambda part: part.reshape(*part.shape[:4], U * u, *part.shape[6:])  # noqa: E731
    return SoftmaxSoFar(*(flat(part) for part in parts))


def _attend_prefix(
    q, running, buffers: Pairs, visibility, j, geometry, spec
) -> SoftmaxSoFar:
    """Adds the persistent pairs of all earlier tiles."""
    if geometry.steps == 1:  # no earlier tile
        return running

    def attend_chunk(chunk, running):
        # Chunks reach beyond the earlier tiles, up to the next multiple: the bias hides
        # those.
        k, v = cut(buffers, chunk * geometry.chunk, geometry.chunk)
        dtype = running.weighted.dtype
        bias = prefix_bias(visibility, j, chunk, geometry, dtype)
        return merge(running, logits_of(q, k, spec.logit_scale) + bias, v, spec.dtype)

    return jax.lax.fori_loop(0, prefix_chunks(j, geometry), attend_chunk, running)


def _recur(
    x,
    q,
    running: SoftmaxSoFar,
    rotary,
    w,
    matrices: FewRowsMatrices,
    visibility,
    j,
    geometry: Geometry,
    spec,
):
    """Runs the recurrence through a tile's units."""
    L, b, B, _ = x.shape
    U, u = geometry.units, geometry.unit
    bias = tile_bias(visibility, j, geometry, x.dtype)

    def unit(pairs, inputs):
        i, x, q, running, bias, rotary = inputs
        # Earlier units of the tile; with one unit there is none.
        if U > 1:
            logits = logits_of(q, pairs.keys, spec.logit_scale) + bias
            running = merge(running, logits, pairs.values, spec.dtype)
        attended, lse = finish(running)
        attended = jnp.moveaxis(attended, 4, 1).reshape(L, u, B, -1)
        attended = attended.astype(spec.dtype)
        # The layer as the README has it: y = x + s a, z = y + s MLP(norm y), and z's
        # pair.
        out = few_rows_linear(attended, matrices.w_out, w.b_out)
        y = x + spec.residual_scale * out
        normed = pre_norm(y, w.mlp_norm, spec)
        pre = few_rows_linear(normed, matrices.w_in, w.b_in)
        gated = w.w_in.shape[-1] != w.w_down.shape[1]
        hidden = activate(pre, spec, gated=gated)
        down = few_rows_linear(hidden, matrices.w_down, w.b_down)
        z = y + spec.residual_scale * down
        # The pair that later units of the tile read, and later tiles after them.
        source = persistent_source(z, w, spec)
        k, v = jnp.split(few_rows_linear(source, matrices.w_kv, w.b_kv), 2, -1)
        pairs = put(pairs, pairs_of(k, v, w, rotary, spec), i * u)
        lse = jnp.moveaxis(lse, 4, 1).reshape(L, u, B, -1)
        return pairs, (z, attended, lse)

    # The tile's own pairs in a small buffer: a unit reads b of them and not the prefix.
    empty = empty_pairs(L, B, b, spec, spec.dtype)
    inputs = (
        jnp.arange(U),
        split_units(x, geometry, axis=1),
        split_units(q, geometry, axis=4),
        SoftmaxSoFar(*(split_units(part, geometry, axis=4) for part in running)),
        split_units(bias, geometry, axis=4),
        None
        if rotary is None
        else tuple(split_units(t, geometry, axis=1) for t in rotary),
    )
    pairs, rows = jax.lax.scan(unit, empty, inputs)
    return *(join_tiles(part, axis=1) for part in rows), pairs
