"""The backward loop of the XLA path: the forward's steps in reverse.

Activations of a tile are recomputed in one batch from x, z, the attended values and
the log-normalizers. Then its recurrence runs in reverse; then, again in batches, its
queries hand gradients to all earlier pairs, and the weights' gradients add up.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerSpec,
    RecurrentCache,
    Residuals,
)
from pallas_kernels.recurrent_prefill.equations import (
    HIDDEN,
    Prepared,
    linear,
    persistent_source,
    pre_norm,
    rotation,
)
from pallas_kernels.recurrent_prefill.xla.attention import (
    Pairs,
    cached_pairs,
    empty_pairs,
    pairs_of,
    place_projections,
    put,
)
from pallas_kernels.recurrent_prefill.xla.attention_backward import (
    Attending,
    PairGradients,
    attend_backward,
    cut_gradients,
    cut_met,
    leave_own_unit,
    leave_prefix,
    logit_gradients,
    met,
    probabilities,
    query_gradient,
    turn_over,
)
from pallas_kernels.recurrent_prefill.xla.biases import (
    Placement,
    bias_of_cache,
    positions_of,
    step_slots,
    tile_bias,
)
from pallas_kernels.recurrent_prefill.xla.few_rows import transpose
from pallas_kernels.recurrent_prefill.xla.geometry import (
    Geometry,
    cut_tiles,
    from_above,
    of_first_stage,
    skew,
)
from pallas_kernels.recurrent_prefill.xla.recurrence_backward import (
    TileRows,
    of_projections,
    of_recurrence,
    recur_backward,
    zeros_like_weights,
)


class CallGradients(NamedTuple):
    """Gradients of x [positions, B, D], of the prepared weights, of cached pairs."""

    x: Array
    weights: Prepared
    cached: PairGradients | None


def run_layers_backward(
    for_z: Array,
    for_persistent: PairGradients | None,
    for_temporary: PairGradients | None,
    x: Array,
    residuals: Residuals,
    w: Prepared,
    cache: RecurrentCache,
    place: Placement,
    *,
    geometry: Geometry,
    spec: LayerSpec,
) -> CallGradients:
    """Takes the gradient of the last layer's z back through all layers of `w`.

    Args:
      for_z: [positions, B, D]; with stages, the last one's z and the first one's x.
      for_persistent, for_temporary: of the new pairs, [L, B, K, E, positions], from
        what became of the cache; None without one.
      x: inputs of all layers, [L, positions, B, D].
    """
    L, b, wide = geometry.layers, geometry.tile, x.dtype
    tiles = partial(_tiles, geometry=geometry)
    late = jnp.zeros(((geometry.depth - 1) * b, *for_z.shape[1:]), wide)
    buffers, of_pairs = _persistent(
        residuals.z, for_persistent, w, place, geometry, spec
    )
    past = cached_pairs(cache, spec)
    past = None if past is None else met(past)
    turned = transpose(w)

    def step(carry, inputs):
        above, of_pairs, of_past, total = carry
        j, for_z, for_own, tile = inputs
        for_z = from_above(for_z, above, geometry)
        positions = positions_of(place, step_slots(j, geometry), geometry)
        turn = rotation(positions, spec, wide)
        normed, pull_norm = jax.vjp(
            lambda x, p: pre_norm(x, p, spec), tile.x, w.attention_norm
        )
        (q, own), pull_heads = jax.vjp(
            lambda flat, q, k: place_projections(flat, q, k, turn, spec),
            linear(normed, w.w_qkv, w.b_qkv),
            w.q_norm,
            w.k_norm,
        )
        q, own = jax.tree.map(lambda part: part.astype(spec.dtype), (q, own))
        pairs = cut_met(buffers, j * b, b)
        of = Attending(q, tile.log_normalizer, q, tile.log_normalizer)
        bias = tile_bias(place, j, geometry, wide)
        p = probabilities(of, pairs, bias, spec.logit_scale)
        rows = _recompute(tile, w, spec)
        g, for_attended, delta = recur_backward(
            for_z,
            cut_gradients(of_pairs, j * b, b),
            rows,
            q,
            pairs.values,
            p,
            turn,
            w,
            turned,
            geometry=geometry,
            spec=spec,
        )
        of = of._replace(for_attended=for_attended, delta=delta)
        for_logits = logit_gradients(p, for_attended, delta, pairs.values)
        for_q = query_gradient(for_logits, pairs.key_rows, spec.logit_scale)
        more, of_own = leave_own_unit(of, own, place, j, geometry, spec)
        for_q = for_q + more
        if for_own is not None:
            of_own = jax.tree.map(jnp.add, of_own, for_own)
        for_q, of_pairs = leave_prefix(
            for_q, of_pairs, of, buffers, place, j, geometry, spec
        )
        if past is not None:
            bias = bias_of_cache(place, positions, cache, spec, wide)
            more, new = attend_backward(of, turn_over(of), past, bias, spec.logit_scale)
            for_q, of_past = for_q + more, jax.tree.map(jnp.add, of_past, new)
        of_own = Pairs(of_own.keys, jnp.swapaxes(of_own.values, 3, 4))
        for_flat, for_q_norm, for_k_norm = pull_heads((for_q, of_own))
        through, for_norm = pull_norm(linear(for_flat, turned.w_qkv))
        total = of_recurrence(total, g, rows, turn, w, spec)
        norms = {"attention_norm": for_norm, "q_norm": for_q_norm, "k_norm": for_k_norm}
        total = of_projections(total, normed, for_flat, norms, spec)
        for_x = g.y + through
        return (for_x, of_pairs, of_past, total), for_x[0]

    log_normalizer = skew(residuals.log_normalizer, geometry, axis=1, fill=-HIDDEN)
    log_normalizer = log_normalizer.reshape(
        *log_normalizer.shape[:3], spec.key_heads, -1
    )
    inputs = (
        jnp.arange(geometry.steps),
        jnp.concatenate([late, for_z]).reshape(-1, 1, b, *for_z.shape[1:]),
        jax.tree.map(partial(tiles, axis=4), for_temporary),
        _Tile(
            x=tiles(x, axis=1),
            z=tiles(residuals.z, axis=1),
            attended=tiles(residuals.attended, axis=1),
            log_normalizer=cut_tiles(
                jnp.moveaxis(log_normalizer, 1, 4), geometry, axis=4
            ),
        ),
    )
    above = jnp.zeros((L, b, *x.shape[2:]), wide)
    of_past = None
    if past is not None:
        of_past = PairGradients(*(jnp.zeros(past.keys.shape, wide) for _ in range(2)))
    first = (above, of_pairs, of_past, zeros_like_weights(w, wide))
    (_, _, of_past, total), for_x = jax.lax.scan(step, first, inputs, reverse=True)
    for_x = for_x[: geometry.tiles].reshape(-1, *for_x.shape[2:])
    return CallGradients(of_first_stage(for_x, geometry), total, of_past)


class _Tile(NamedTuple):
    """What the forward pass kept, by tile: rows [L, b, B, ...]."""

    x: Array
    z: Array
    attended: Array
    log_normalizer: Array  # [L, B, K, G, b]


def _tiles(rows: Array, *, geometry: Geometry, axis: int) -> Array:
    """Turns positions on `axis` of [L, ...] into [steps, L, ...] for a scan."""
    return cut_tiles(skew(rows, geometry, axis=axis), geometry, axis=axis)


def _persistent(z, for_persistent, w, place, geometry: Geometry, spec):
    """Computes all persistent pairs again, and starts their gradients."""
    L, B = z.shape[0], z.shape[2]
    late = skew(z, geometry, axis=1)
    used = late.shape[1]
    turn = rotation(positions_of(place, jnp.arange(used), geometry), spec, z.dtype)
    flat = linear(persistent_source(late, w, spec), w.w_kv, w.b_kv)
    k, v = jnp.split(flat, 2, axis=-1)
    pairs = pairs_of(k, v, w, turn, spec)
    buffers = put(empty_pairs(L, B, geometry.slots, spec, spec.dtype), pairs, 0)
    buffers = met(buffers)
    zero = jnp.zeros(buffers.keys.shape, z.dtype)
    if for_persistent is None:
        return buffers, PairGradients(zero, zero)
    gradients = (skew(part, geometry, axis=4) for part in for_persistent)
    return buffers, PairGradients(*(zero.at[..., :used].add(g) for g in gradients))


def _recompute(tile: _Tile, w: Prepared, spec: LayerSpec) -> TileRows:
    """Computes a tile's activations again."""
    y = tile.x + spec.residual_scale * linear(tile.attended, w.w_out, w.b_out)
    return TileRows(
        y=y,
        z=tile.z,
        pre=linear(pre_norm(y, w.mlp_norm, spec), w.w_in, w.b_in),
        projected=linear(persistent_source(tile.z, w, spec), w.w_kv, w.b_kv),
        attended=tile.attended,
    )
