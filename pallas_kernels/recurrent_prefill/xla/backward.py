"""The backward loop of the XLA path: the forward's steps in reverse.

Activations of a tile are recomputed in one batch from x, z, the attended values and
the log-normalizers. Then its recurrence runs in reverse; then, again in batches, its
queries hand gradients to all earlier pairs, and the weights' gradients add up.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

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
    heads_of_projections,
    pairs_of,
    put,
)
from pallas_kernels.recurrent_prefill.xla.attention_backward import (
    Attending,
    PairGradients,
    attend_backward,
    columns_of,
    cut_columns,
    cut_gradients,
    logit_gradients,
    own_unit_backward,
    prefix_backward,
    probabilities,
    query_gradient,
    transpose_queries,
)
from pallas_kernels.recurrent_prefill.xla.biases import (
    Visibility,
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
    add_projections,
    add_recurrence,
    recur_backward,
    zeros_like_weights,
)


class CallGradients(NamedTuple):
    """Gradients of x [positions, B, D], of the prepared weights, of cached pairs."""

    x: Array
    weights: Prepared
    cached: PairGradients | None


def run_layers_backward(
    dz: Float[Array, "T B D"],
    dpersistent: PairGradients | None,
    dtemporary: PairGradients | None,
    x: Float[Array, "L T B D"],
    residuals: Residuals,
    w: Prepared,
    cache: RecurrentCache,
    visibility: Visibility,
    *,
    geometry: Geometry,
    spec: LayerSpec,
) -> CallGradients:
    """Takes the gradient of the last layer's z back through all layers of `w`.

    Args:
      dz: [positions, B, D]; with stages, the last one's z and the first one's x.
      dpersistent, dtemporary: of the new pairs, [L, B, K, E, positions], from
        what became of the cache; None without one.
      x: inputs of all layers, [L, positions, B, D].
    """
    L, b, wide = geometry.layers, geometry.tile, x.dtype
    tiles = partial(_tiles, geometry=geometry)
    # Steps before a layer's first tile, and after its last, run on zeros.
    late = jnp.zeros(((geometry.depth - 1) * b, *dz.shape[1:]), wide)
    # All persistent pairs at once: the forward pass kept z and not them. A tile's
    # gradients of its own pairs are whole when the loop, in reverse, comes to it.
    buffers, dpairs = _persistent(
        residuals.z, dpersistent, w, visibility, geometry, spec
    )
    past = cached_pairs(cache, spec)
    past = None if past is None else columns_of(past)
    transposed = transpose(w)

    def step(carry, inputs):
        above, dpairs, dpast, total = carry
        j, dz, dwritten, tile = inputs
        # 1. The tile once more, in one batch: rotary tables, queries, temporary pairs,
        # activations, and the probabilities of its queries on its own persistent pairs.
        dz = from_above(dz, above, geometry)
        positions = positions_of(visibility, step_slots(j, geometry), geometry)
        rotary = rotation(positions, spec, wide)
        normed, pull_norm = jax.vjp(
            lambda x, p: pre_norm(x, p, spec), tile.x, w.attention_norm
        )
        (q, own), pull_heads = jax.vjp(
            lambda flat, q, k: heads_of_projections(flat, q, k, rotary, spec),
            linear(normed, w.w_qkv, w.b_qkv),
            w.q_norm,
            w.k_norm,
        )
        q, own = jax.tree.map(lambda part: part.astype(spec.dtype), (q, own))
        pairs = cut_columns(buffers, j * b, b)
        # do and delta are not known yet; probabilities do not read them.
        of = Attending(q, tile.lse, q, tile.lse)
        bias = tile_bias(visibility, j, geometry, wide)
        p = probabilities(of, pairs, bias, spec.logit_scale)
        # 2. The recurrence in reverse: all that is sequential.
        rows = _recompute(tile, w, spec)
        g, do, delta = recur_backward(
            dz,
            cut_gradients(dpairs, j * b, b),
            rows,
            q,
            pairs.values,
            p,
            rotary,
            w,
            transposed,
            geometry=geometry,
            spec=spec,
        )
        # 3. The queries, against the tile's pairs, their own unit's temporary ones,
        # earlier tiles and the cache.
        of = of._replace(do=do, delta=delta)
        ds = logit_gradients(p, do, delta, pairs.values)
        dq = query_gradient(ds, pairs.key_rows, spec.logit_scale)
        more, dunit = own_unit_backward(of, own, visibility, j, geometry, spec)
        dq = dq + more
        if dwritten is not None:
            dunit = jax.tree.map(jnp.add, dunit, dwritten)
        dq, dpairs = prefix_backward(
            dq, dpairs, of, buffers, visibility, j, geometry, spec
        )
        if past is not None:
            bias = bias_of_cache(visibility, positions, cache, spec, wide)
            more, new = attend_backward(
                of, transpose_queries(of), past, bias, spec.logit_scale
            )
            dq, dpast = dq + more, jax.tree.map(jnp.add, dpast, new)
        # Back to the layout that the projections wrote: values lie as rows there.
        dunit = Pairs(dunit.dk, jnp.swapaxes(dunit.dv, 3, 4))
        # 4. Through the projections to x, and the weights' share of this tile.
        dflat, dq_norm, dk_norm = pull_heads((dq, dunit))
        through, dnorm = pull_norm(linear(dflat, transposed.w_qkv))
        total = add_recurrence(total, g, rows, rotary, w, spec)
        norms = {"attention_norm": dnorm, "q_norm": dq_norm, "k_norm": dk_norm}
        total = add_projections(total, normed, dflat, norms, spec)
        dx = g.dy + through
        return (dx, dpairs, dpast, total), dx[0]

    # Outside the sequence a large lse makes every probability 0, and so every gradient.
    lse = skew(residuals.lse, geometry, axis=1, fill=-HIDDEN)
    lse = lse.reshape(*lse.shape[:3], spec.key_heads, -1)
    inputs = (
        jnp.arange(geometry.steps),
        jnp.concatenate([late, dz]).reshape(-1, 1, b, *dz.shape[1:]),
        jax.tree.map(partial(tiles, axis=4), dtemporary),
        _Tile(
            x=tiles(x, axis=1),
            z=tiles(residuals.z, axis=1),
            attended=tiles(residuals.attended, axis=1),
            lse=cut_tiles(jnp.moveaxis(lse, 1, 4), geometry, axis=4),
        ),
    )
    above = jnp.zeros((L, b, *x.shape[2:]), wide)
    dpast = None
    if past is not None:
        dpast = PairGradients(*(jnp.zeros(past.keys.shape, wide) for _ in range(2)))
    first = (above, dpairs, dpast, zeros_like_weights(w, wide))
    (_, _, dpast, total), dx = jax.lax.scan(step, first, inputs, reverse=True)
    dx = dx[: geometry.tiles].reshape(-1, *dx.shape[2:])
    return CallGradients(of_first_stage(dx, geometry), total, dpast)


class _Tile(NamedTuple):
    """What the forward pass kept, by tile: rows [L, b, B, ...]."""

    x: Array
    z: Array
    attended: Array
    lse: Array  # [L, B, K, Q, b]


def _tiles(rows: Array, *, geometry: Geometry, axis: int) -> Array:
    """Turns positions on `axis` of [L, ...] into [steps, L, ...] for a scan."""
    return cut_tiles(skew(rows, geometry, axis=axis), geometry, axis=axis)


def _persistent(z, dpersistent, w, visibility, geometry: Geometry, spec):
    """Computes all persistent pairs again, and starts their gradients."""
    L, B = z.shape[0], z.shape[2]
    # The pairs were not kept: they follow from z. The biases hide what lies outside a
    # layer's positions.
    late = skew(z, geometry, axis=1)
    used = late.shape[1]
    rotary = rotation(
        positions_of(visibility, jnp.arange(used), geometry), spec, z.dtype
    )
    flat = linear(persistent_source(late, w, spec), w.w_kv, w.b_kv)
    k, v = jnp.split(flat, 2, axis=-1)
    pairs = pairs_of(k, v, w, rotary, spec)
    buffers = put(empty_pairs(L, B, geometry.slots, spec, spec.dtype), pairs, 0)
    buffers = columns_of(buffers)
    zero = jnp.zeros(buffers.keys.shape, z.dtype)
    if dpersistent is None:
        return buffers, PairGradients(zero, zero)
    gradients = (skew(part, geometry, axis=4) for part in dpersistent)
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
