"""The recurrence of one tile, backwards: all that is sequential in the backward pass.

From the last unit to the first: the gradient of a unit's persistent pairs is complete
once all later units are done; it leads through z and the MLP to the gradient of what
the unit attended to. Everything else waits until the tile is done.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import (
    Prepared,
    Rotary,
    activate,
    norm_and_rotate,
    persistent_source,
    pre_norm,
)
from pallas_kernels.recurrent_prefill.xla.attention_backward import (
    PairGradients,
    logit_gradients,
)
from pallas_kernels.recurrent_prefill.xla.few_rows import Transposed, few_rows_linear
from pallas_kernels.recurrent_prefill.xla.geometry import (
    Geometry,
    join_tiles,
    split_units,
)


class TileRows(NamedTuple):
    """A tile's activations, recomputed in one batch; rows [L, b, B, ...]."""

    y: Array
    z: Array
    pre: Array
    projected: Array
    attended: Array


class RowGradients(NamedTuple):
    """Gradients of a tile's rows [L, b, B, ...], from which the weights' follow.

    Attributes:
      dk: of the persistent keys, [..., K E].
      dprojected: of the persistent pair's projection, [..., 2 K E].
      dsource: of what that projection reads.
      dz, dpre, dnormed, dy: of z, the MLP's pre-activations, its normed input and y.
    """

    dk: Array
    dprojected: Array
    dsource: Array
    dz: Array
    dpre: Array
    dnormed: Array
    dy: Array


def recur_backward(
    dz: Float[Array, "L b B D"],
    dlater: PairGradients,
    rows: TileRows,
    q: Float[Array, "L B K Q b E"],
    values: Float[Array, "L B K E b"],
    p: Float[Array, "L B K Q b b"],
    rotary: Rotary | None,
    w: Prepared,
    t: Transposed,
    *,
    geometry: Geometry,
    spec: LayerSpec,
) -> tuple[RowGradients, Float[Array, "L B K Q b E"], Float[Array, "L B K Q b"]]:
    """Runs through a tile's units in reverse.

    Args:
      dz: gradient of z from above, [L, b, B, D].
      dlater: gradients of the tile's persistent pairs from all later tiles.
      rows: the tile's activations.
      q: its queries, [L, B, K, Q, b, E]; values: its persistent ones, [L, B, K, E, b].
      p: probabilities of its queries on its pairs, 0 except on earlier units.

    Returns:
      Gradients of the rows, of the attended values and delta [L, B, K, Q, b].
    """
    L, b, B, _ = dz.shape
    K, E = spec.key_heads, spec.head_width
    U, u = geometry.units, geometry.unit
    s, wide = spec.residual_scale, dz.dtype
    gated = w.w_in.shape[-1] != w.w_down.shape[1]

    def unit(carry, inputs):
        do, delta = carry
        i, dz, dpairs, row, v, p, rotary = inputs
        # dk and dv are complete: later tiles' part came in, and the tile's later units
        # have left their do and delta. A unit that is not done yet has do = 0.
        if U > 1:
            # The unit's pairs as seen by all queries of the tile; p is 0 for those
            # before it.
            ds = logit_gradients(p, do, delta, v)
            inside = PairGradients(spec.logit_scale * _gather(ds, q), _gather(p, do))
            dpairs = jax.tree.map(jnp.add, dpairs, inside)
        dk, dv = (jnp.moveaxis(g, 4, 1).reshape(L, u, B, -1) for g in dpairs)
        # Through the k-norm, the pair's projection and its norm to z.
        k, _ = jnp.split(row.projected, 2, axis=-1)
        _, pull = jax.vjp(lambda k: norm_and_rotate(k, w.k_norm, rotary, spec), k)
        dprojected = jnp.concatenate([*pull(_heads(dk, K, E)), dv], axis=-1)
        dsource = few_rows_linear(dprojected, t.w_kv, w.w_kv)
        dz = dz + _pull(partial(persistent_source, w=w, spec=spec), row.z, dsource)
        # Through the MLP and its norm to y.
        dhidden = few_rows_linear(s * dz, t.w_down, w.w_down)
        dpre = _pull(partial(activate, spec=spec, gated=gated), row.pre, dhidden)
        dnormed = few_rows_linear(dpre, t.w_in, w.w_in)
        before = partial(pre_norm, parameters=w.mlp_norm, spec=spec)
        dy = dz + _pull(before, row.y, dnormed)
        # Through W_out to what the unit attended to.
        new_do = few_rows_linear(s * dy, t.w_out, w.w_out)
        new_do = _heads(new_do, spec.heads, E)
        new_delta = jnp.sum(new_do * _heads(row.attended, spec.heads, E), axis=-1)
        new_do = jnp.moveaxis(new_do.reshape(L, u, B, K, -1, E), 1, 4)
        new_delta = jnp.moveaxis(new_delta.reshape(L, u, B, K, -1), 1, 4)
        update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * u, axis=4)
        carry = update(do, new_do.astype(spec.dtype)), update(delta, new_delta)
        return carry, RowGradients(dk, dprojected, dsource, dz, dpre, dnormed, dy)

    split = partial(split_units, geometry=geometry)
    inputs = (
        jnp.arange(U),
        split(dz, axis=1),
        jax.tree.map(partial(split, axis=4), dlater),
        jax.tree.map(partial(split, axis=1), rows),
        split(values, axis=4),
        split(p, axis=5),
        jax.tree.map(partial(split, axis=1), rotary),
    )
    zero = jnp.zeros(q.shape, spec.dtype), jnp.zeros(q.shape[:-1], wide)
    (do, delta), gradients = jax.lax.scan(unit, zero, inputs, reverse=True)
    gradients = jax.tree.map(partial(join_tiles, axis=1), gradients)
    return gradients, do, delta


def _gather(weights: Array, rows: Array) -> Array:
    """Returns sum_t weights [L, B, K, Q, T, S] rows [..., T, E] as [L, B, K, E, S].

    The tile's rows lie as the loop carries them: turning them over at every unit would
    cost more than the sum.
    """
    gathered = jnp.einsum(
        "lbkqts,lbkqte->lbkse",
        weights.astype(rows.dtype),
        rows,
        preferred_element_type=weights.dtype,
    )
    return jnp.swapaxes(gathered, 3, 4)


def _heads(rows: Array, heads: int, width: int) -> Array:
    return rows.reshape(*rows.shape[:-1], heads, width)


def _pull(function, at: Array, gradient: Array) -> Array:
    """Returns the gradient of function's argument."""
    return jax.vjp(function, at)[1](gradient)[0]


def zeros_like_weights(w: Prepared, dtype) -> Prepared:
    """Makes the wide accumulators of all weights."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), w)


def add_recurrence(
    total: Prepared,
    g: RowGradients,
    rows: TileRows,
    rotary: Rotary | None,
    w: Prepared,
    spec: LayerSpec,
) -> Prepared:
    """Adds what a tile's recurrence owes to w_kv, w_out and the MLP."""
    s = spec.residual_scale
    # One contraction a weight for the whole tile: inside the loop they would be
    # products of a few rows, and the slowest part.
    hidden = activate(rows.pre, spec, gated=w.w_in.shape[-1] != w.w_down.shape[1])
    # Norms again, to get both their output and their parameters' gradient.
    normed, pull_mlp_norm = jax.vjp(lambda p: pre_norm(rows.y, p, spec), w.mlp_norm)
    source, pull_norm = jax.vjp(
        lambda p: persistent_source(rows.z, w._replace(attention_norm=p), spec),
        w.attention_norm,
    )
    k, _ = jnp.split(rows.projected, 2, axis=-1)
    keys, pull_k_norm = jax.vjp(lambda p: norm_and_rotate(k, p, rotary, spec), w.k_norm)
    return _add(
        total,
        w_kv=_product(source, g.dprojected, spec),
        w_out=_product(rows.attended, s * g.dy, spec),
        w_in=_product(normed, g.dpre, spec),
        w_down=_product(hidden, s * g.dz, spec),
        b_kv=_sum(g.dprojected, w.b_kv),
        b_out=_sum(s * g.dy, w.b_out),
        b_in=_sum(g.dpre, w.b_in),
        b_down=_sum(s * g.dz, w.b_down),
        attention_norm=pull_norm(g.dsource)[0],
        mlp_norm=pull_mlp_norm(g.dnormed)[0],
        k_norm=pull_k_norm(g.dk.reshape(keys.shape))[0],
    )


def add_projections(
    total: Prepared,
    normed: Float[Array, "L b B D"],
    dflat: Float[Array, "L b B N"],
    dnorms: dict[str, tuple[Array | None, Array | None]],
    spec: LayerSpec,
) -> Prepared:
    """Adds what a tile's queries and temporary pairs owe.

    Args:
      normed: rows that w_qkv reads; dflat: gradient of what it writes.
      dnorms: gradients of attention_norm, q_norm and k_norm.
    """
    return _add(
        total,
        w_qkv=_product(normed, dflat, spec),
        b_qkv=_sum(dflat, total.b_qkv),
        **dnorms,
    )


def _product(rows: Array, gradients: Array, spec: LayerSpec) -> Array:
    """Contracts rows [L, b, B, N] with [L, b, B, M] to [L, N, M]."""
    rows, narrow = rows.astype(spec.dtype), gradients.astype(spec.dtype)
    return jnp.einsum(
        "ltbn,ltbm->lnm", rows, narrow, preferred_element_type=gradients.dtype
    )


def _sum(gradients: Array, bias: Array | None) -> Array | None:
    return None if bias is None else jnp.sum(gradients, axis=(1, 2))


def _add(total: Prepared, **more: Any) -> Prepared:
    """Adds field by field; None adds nothing."""
    added = {
        name: jax.tree.map(jnp.add, getattr(total, name), new)
        for name, new in more.items()
        if new is not None
    }
    return total._replace(**added)
