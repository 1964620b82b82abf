"""The backward of a tile on TPU: one kernel runs through its positions in reverse.

Attention across tiles is plain products, left to XLA.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import Prepared
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    NEAR,
    Launch,
    dot,
    head_indicator,
    launch_kernel,
    resident,
    slopes_row,
)
from pallas_kernels.recurrent_prefill.tiles.backward import (
    Kept,
    Kernels,
    LaterQueries,
    QueryGradients,
)
from pallas_kernels.recurrent_prefill.tiles.gradients import Known, PositionGradients
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors


def mosaic_kernels(launch: Launch) -> Kernels:
    """Returns the parts of the backward loop; attention across tiles is XLA's."""
    return Kernels(
        later_queries_backward=partial(later_queries_backward, launch.spec),
        positions_backward=partial(_positions_back, launch),
        queries_backward=partial(queries_backward, launch.spec),
    )


def _positions_back(
    launch: Launch, tile: Kept, w: Prepared, known: Known, q: Array, dk, dv
) -> tuple[PositionGradients, Array]:
    """See `Kernels`; for one layer."""
    spec, block_b = launch.spec, launch.tiles.rows
    _, b, B, D = tile.x.shape
    vectors = Vectors.of(w, spec, D)
    lse = tile.lse.swapaxes(2, 3)  # [L, b, B, H]
    factors = (known.factor_y, known.factor_z, known.factor_k)
    rows = [
        *(dk, dv, known.keys, known.values, q, tile.attended, lse),
        *(known.unit_y, known.unit_z, known.unit_k),
        *(factor[..., None] for factor in factors),
        *(known.slopes, tile.dz),
    ]
    weights = [w.w_out, w.w_in, w.w_down, w.w_kv]
    scales = [vectors.mlp_norm[0], vectors.attention_norm[0], vectors.k_norm[0]]
    KE, pre_width = dk.shape[-1], known.slopes.shape[-1]
    wide, narrow = jnp.float32, spec.dtype
    outs = [
        *((D, wide), (D, wide), (D, wide), (D, wide)),
        *((pre_width, narrow), (KE, wide), (KE, wide), (q.shape[-1], narrow)),
    ]
    block = lambda width: pl.BlockSpec((b, block_b, width), lambda i, _: (0, i, 0))  # noqa: E731
    out = launch_kernel(
        launch,
        _positions_back_kernel,
        *(part[0] for part in rows),
        *(part[0] for part in weights),
        *scales,
        grid=(B // block_b, 1),
        in_specs=[
            *(block(part.shape[-1]) for part in rows),
            *(resident(part[0]) for part in weights),
            *(resident(part) for part in scales),
        ],
        out_specs=[block(width) for width, _ in outs],
        out_shape=[jax.ShapeDtypeStruct((b, B, width), dtype) for width, dtype in outs],
        scratch_shapes=[
            pltpu.VMEM((b, block_b, q.shape[-1]), jnp.float32),
            pltpu.VMEM((b, block_b, spec.heads), jnp.float32),
        ],
        spec=spec,
    )
    *found, do = (part[None] for part in out)
    return PositionGradients(*found), do


# A program owns block_b rows of one tile. The layer's weights stay in VMEM from program
# to program; the tile's queries, pairs and inner values cross HBM once, and so do the
# cotangents that it writes.
def _positions_back_kernel(
    dk_ref,
    dv_ref,
    k_ref,
    v_ref,
    q_ref,
    attended_ref,
    lse_ref,
    unit_y_ref,
    unit_z_ref,
    unit_k_ref,
    factor_y_ref,
    factor_z_ref,
    factor_k_ref,
    slopes_ref,
    dz_ref,
    w_out_ref,
    w_in_ref,
    w_down_ref,
    w_kv_ref,
    mlp_scale_ref,
    attention_scale_ref,
    k_scale_ref,
    y_ref,
    z_ref,
    normed_y_ref,
    normed_z_ref,
    pre_ref,
    keys_ref,
    values_ref,
    out_ref,
    do_ref,
    delta_ref,
    *,
    spec,
):
    b, block_b, HE = do_ref.shape
    H, s, dtype = spec.heads, spec.residual_scale, w_out_ref.dtype
    copies = w_in_ref.shape[1] // w_down_ref.shape[0]
    indicator, slopes = head_indicator(spec), slopes_row(spec)
    kind_z = spec.norm if spec.normed_persistent else "none"
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    back = partial(dot, transposed=True)

    def by_head(products):
        """Sums [..., H E] over each head, [..., H]."""
        flat = dot(products.reshape(-1, HE), indicator)
        return flat.reshape(*products.shape[:-1], H)

    def over_heads(p):
        """Repeats [..., H] over each head's width."""
        return dot(p.reshape(-1, H), indicator.T).reshape(*p.shape[:-1], HE)

    do_ref[:] = jnp.zeros_like(do_ref)
    delta_ref[:] = jnp.zeros_like(delta_ref)

    def position(i, _):
        t = b - 1 - i
        k, v = wide(k_ref[t])[None], wide(v_ref[t])[None]

        def attend_chunk(c, totals):
            keys, values = totals
            part = pl.ds(c * NEAR, NEAR)
            at = c * NEAR + jax.lax.broadcasted_iota(jnp.int32, (NEAR, block_b, H), 0)
            q, do = wide(q_ref[part]), do_ref[part]
            logits = spec.logit_scale * by_head(q * k)
            logits = logits - slopes[None] * (at - t).astype(jnp.float32)
            p = jnp.exp(logits - lse_ref[part])
            p = jnp.where(at > t, p, 0.0)
            ds = spec.logit_scale * p * (by_head(do * v) - delta_ref[part])
            keys = keys + jnp.sum(over_heads(ds) * q, axis=0)
            return keys, values + jnp.sum(over_heads(p) * do, axis=0)

        keys, values = jax.lax.fori_loop(
            (t + 1) // NEAR, b // NEAR, attend_chunk, (dk_ref[t], dv_ref[t])
        )
        keys_ref[t], values_ref[t] = keys, values
        raw_k = _standardised_back(
            *(keys * k_scale_ref[...], unit_k_ref[t], factor_k_ref[t]), spec.qk_norm
        )
        normed_z = back(raw_k.astype(dtype), w_kv_ref[:, :HE])
        normed_z = normed_z + back(values.astype(dtype), w_kv_ref[:, HE:])
        normed_z_ref[t] = normed_z
        z = dz_ref[t] + _standardised_back(
            *(normed_z * attention_scale_ref[...], unit_z_ref[t], factor_z_ref[t]),
            kind_z,
        )
        z_ref[t] = z
        hidden = back((s * z).astype(dtype), w_down_ref[...])
        hidden = jnp.concatenate([hidden] * copies, axis=1)
        pre = (hidden * wide(slopes_ref[t])).astype(dtype)
        pre_ref[t] = pre
        normed_y = back(pre, w_in_ref[...])
        normed_y_ref[t] = normed_y
        y = z + _standardised_back(
            *(normed_y * mlp_scale_ref[...], unit_y_ref[t], factor_y_ref[t]), spec.norm
        )
        y_ref[t] = y
        out = back((s * y).astype(dtype), w_out_ref[...]).astype(dtype)
        out_ref[t], do_ref[t] = out, wide(out)
        delta_ref[t] = by_head(wide(out) * wide(attended_ref[t]))

    jax.lax.fori_loop(0, b, position, None)


def _standardised_back(g, unit, factor, kind):
    """Maps the cotangent of unit rows back through their standardisation."""
    if kind == "none":
        return g
    g = (
        g
        - unit * jnp.mean(g * unit, axis=-1, keepdims=True)
        - (jnp.mean(g, axis=-1, keepdims=True) if kind == "layer" else 0.0)
    )
    return g * factor


def later_queries_backward(
    spec: LayerSpec, keys, values, later: LaterQueries, first, at
):
    """See `Kernels`; one product over all queries, those before `first` masked."""
    shape = keys.shape
    k, v = (_heads(part, spec) for part in (keys, values))  # [L, b, B, H, E]
    q, do = (_heads(part, spec) for part in later[:2])  # [L, B, T, H, E]
    query = jnp.arange(q.shape[2])
    key = at[..., None] + jnp.arange(shape[1])  # [L, B, b]
    first = first[..., None]
    logits = _product("lsbhe,lbthe->lbhst", k, q) * spec.logit_scale
    distance = query - key[..., None]
    logits = logits - _slopes(spec) * distance[:, :, None].astype(jnp.float32)
    seen = (key < first)[..., None] & (query >= first)[:, :, None]
    p = jnp.exp(logits - later.lse[:, :, :, None])
    p = jnp.where(seen[:, :, None], p, 0.0)
    ds = p * (_product("lsbhe,lbthe->lbhst", v, do) - later.delta[:, :, :, None])
    ds = (spec.logit_scale * ds).astype(spec.dtype)
    dk = _product("lbhst,lbthe->lsbhe", ds, q)
    dv = _product("lbhst,lbthe->lsbhe", p.astype(spec.dtype), do)
    return dk.reshape(shape), dv.reshape(shape)


def queries_backward(spec: LayerSpec, queries, own_k, own_v, keys, values, before):
    """See `Kernels`; one product over all slots, those not seen masked."""
    q, do, attended, lse = queries
    shape, scale = q.shape, spec.logit_scale
    q, do, attended, own_k, own_v = (
        _heads(part, spec) for part in (q, do, attended, own_k, own_v)
    )
    k, v = (_heads(part, spec) for part in (keys, values))  # [L, B, S, H, E]
    lse = jnp.transpose(lse, (0, 3, 2, 1))  # [L, B, H, b]
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    by_head = lambda part: jnp.transpose(part.sum(-1), (0, 2, 3, 1))  # noqa: E731
    by_row = lambda part: jnp.transpose(part, (0, 3, 1, 2))[..., None]  # noqa: E731
    delta = by_head(wide(do) * wide(attended))
    p = jnp.exp(scale * by_head(wide(q) * wide(own_k)) - lse)
    ds = scale * p * (by_head(wide(do) * wide(own_v)) - delta)
    dk_own, dv_own = by_row(ds) * q, by_row(p) * do
    dq = by_row(ds) * own_k
    at, t = jnp.arange(k.shape[2]), jnp.arange(shape[1])
    query = before[..., None] + t  # [L, B, b]
    distance = (query[..., None] - at)[:, :, None]
    logits = scale * _product("ltbhe,lbshe->lbhts", q, k)
    logits = logits - _slopes(spec) * distance.astype(jnp.float32)
    p = jnp.exp(logits - lse[..., None])
    p = jnp.where(distance > 0, p, 0.0)
    ds = scale * p * (_product("ltbhe,lbshe->lbhts", do, v) - delta[..., None])
    dq = dq + _product("lbhts,lbshe->ltbhe", ds.astype(spec.dtype), k)
    rows = (part.reshape(shape) for part in (dq, dk_own, dv_own))
    return QueryGradients(*rows, delta=jnp.transpose(delta, (0, 3, 2, 1)))


def _heads(rows: Array, spec: LayerSpec) -> Array:
    return rows.reshape(*rows.shape[:-1], -1, spec.head_width)


def _slopes(spec: LayerSpec) -> Array:
    """Returns ALiBi's slopes [H, 1, 1]."""
    return slopes_row(spec)[0][:, None, None]


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
