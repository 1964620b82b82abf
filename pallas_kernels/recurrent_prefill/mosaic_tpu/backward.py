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
from pallas_kernels.recurrent_prefill.tiles.gradients import Known, Sequential
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors


def mosaic_kernels(launch: Launch) -> Kernels:
    """Returns the parts of the backward loop; attention across tiles is XLA's."""
    return Kernels(
        meet_later_queries=partial(meet_later_queries, launch.spec),
        positions=partial(_positions_back, launch),
        query_gradients=partial(query_gradients, launch.spec),
    )


def _positions_back(
    launch: Launch, tile: Kept, w: Prepared, known: Known, q: Array, for_k, for_v
) -> tuple[Sequential, Array]:
    """See `Kernels`; for one layer."""
    spec, R = launch.spec, launch.tiles.rows
    _, b, B, D = tile.x.shape
    vectors = Vectors.of(w, spec, D)
    log_normalizer = tile.log_normalizer.swapaxes(2, 3)  # [L, b, B, H]
    factors = (known.factor_y, known.factor_z, known.factor_k)
    rows = [
        *(for_k, for_v, known.keys, known.values, q, tile.attended, log_normalizer),
        *(known.unit_y, known.unit_z, known.unit_k),
        *(factor[..., None] for factor in factors),
        *(known.slopes, tile.for_z),
    ]
    weights = [w.w_out, w.w_in, w.w_down, w.w_kv]
    scales = [vectors.mlp_norm[0], vectors.attention_norm[0], vectors.k_norm[0]]
    KE, P = for_k.shape[-1], known.slopes.shape[-1]
    wide, narrow = jnp.float32, spec.dtype
    outs = [
        *((D, wide), (D, wide), (D, wide), (D, wide)),
        *((P, narrow), (KE, wide), (KE, wide), (q.shape[-1], narrow)),
    ]
    block = lambda width: pl.BlockSpec((b, R, width), lambda i, _: (0, i, 0))  # noqa: E731
    out = launch_kernel(
        launch,
        _positions_back_kernel,
        *(part[0] for part in rows),
        *(part[0] for part in weights),
        *scales,
        grid=(B // R, 1),
        in_specs=[
            *(block(part.shape[-1]) for part in rows),
            *(resident(part[0]) for part in weights),
            *(resident(part) for part in scales),
        ],
        out_specs=[block(width) for width, _ in outs],
        out_shape=[jax.ShapeDtypeStruct((b, B, width), dtype) for width, dtype in outs],
        scratch_shapes=[
            pltpu.VMEM((b, R, q.shape[-1]), jnp.float32),
            pltpu.VMEM((b, R, spec.heads), jnp.float32),
        ],
        spec=spec,
    )
    *found, for_attended = (part[None] for part in out)
    return Sequential(*found), for_attended


# A program owns R rows of one tile. The layer's weights stay in VMEM from program to
# program; the tile's queries, pairs and inner values cross HBM once, and so do the
# cotangents that it writes.
def _positions_back_kernel(
    for_k_ref,
    for_v_ref,
    k_ref,
    v_ref,
    q_ref,
    attended_ref,
    log_normalizer_ref,
    unit_y_ref,
    unit_z_ref,
    unit_k_ref,
    factor_y_ref,
    factor_z_ref,
    factor_k_ref,
    slopes_ref,
    for_z_ref,
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
    b, R, HE = do_ref.shape
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

        def meet(c, totals):
            keys, values = totals
            part = pl.ds(c * NEAR, NEAR)
            at = c * NEAR + jax.lax.broadcasted_iota(jnp.int32, (NEAR, R, H), 0)
            q, do = wide(q_ref[part]), do_ref[part]
            logits = spec.logit_scale * by_head(q * k)
            logits = logits - slopes[None] * (at - t).astype(jnp.float32)
            p = jnp.exp(logits - log_normalizer_ref[part])
            p = jnp.where(at > t, p, 0.0)
            ds = spec.logit_scale * p * (by_head(do * v) - delta_ref[part])
            keys = keys + jnp.sum(over_heads(ds) * q, axis=0)
            return keys, values + jnp.sum(over_heads(p) * do, axis=0)

        keys, values = jax.lax.fori_loop(
            (t + 1) // NEAR, b // NEAR, meet, (for_k_ref[t], for_v_ref[t])
        )
        keys_ref[t], values_ref[t] = keys, values
        raw_k = _standardised_back(
            *(keys * k_scale_ref[...], unit_k_ref[t], factor_k_ref[t]), spec.qk_norm
        )
        normed_z = back(raw_k.astype(dtype), w_kv_ref[:, :HE])
        normed_z = normed_z + back(values.astype(dtype), w_kv_ref[:, HE:])
        normed_z_ref[t] = normed_z
        z = for_z_ref[t] + _standardised_back(
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
    """Maps the cotangent of unit rows [R, N] back through their standardisation."""
    if kind == "none":
        return g
    g = (
        g
        - unit * jnp.mean(g * unit, axis=-1, keepdims=True)
        - (jnp.mean(g, axis=-1, keepdims=True) if kind == "layer" else 0.0)
    )
    return g * factor


def meet_later_queries(spec: LayerSpec, keys, values, later: LaterQueries, first, at):
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
    p = jnp.exp(logits - later.log_normalizer[:, :, :, None])
    p = jnp.where(seen[:, :, None], p, 0.0)
    ds = p * (_product("lsbhe,lbthe->lbhst", v, do) - later.delta[:, :, :, None])
    ds = (spec.logit_scale * ds).astype(spec.dtype)
    for_k = _product("lbhst,lbthe->lsbhe", ds, q)
    for_v = _product("lbhst,lbthe->lsbhe", p.astype(spec.dtype), do)
    return for_k.reshape(shape), for_v.reshape(shape)


def query_gradients(spec: LayerSpec, queries, own_k, own_v, keys, values, before):
    """See `Kernels`; one product over all slots, those not seen masked."""
    q, do, attended, log_normalizer = queries
    shape, scale = q.shape, spec.logit_scale
    q, do, attended, own_k, own_v = (
        _heads(part, spec) for part in (q, do, attended, own_k, own_v)
    )
    k, v = (_heads(part, spec) for part in (keys, values))  # [L, B, S, H, E]
    log_normalizer = jnp.transpose(log_normalizer, (0, 3, 2, 1))  # [L, B, H, b]
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    by_head = lambda part: jnp.transpose(part.sum(-1), (0, 2, 3, 1))  # noqa: E731
    by_row = lambda part: jnp.transpose(part, (0, 3, 1, 2))[..., None]  # noqa: E731
    delta = by_head(wide(do) * wide(attended))
    p = jnp.exp(scale * by_head(wide(q) * wide(own_k)) - log_normalizer)
    ds = scale * p * (by_head(wide(do) * wide(own_v)) - delta)
    for_own_k, for_own_v = by_row(ds) * q, by_row(p) * do
    for_q = by_row(ds) * own_k
    at, t = jnp.arange(k.shape[2]), jnp.arange(shape[1])
    query = before[..., None] + t  # [L, B, b]
    distance = (query[..., None] - at)[:, :, None]
    logits = scale * _product("ltbhe,lbshe->lbhts", q, k)
    logits = logits - _slopes(spec) * distance.astype(jnp.float32)
    p = jnp.exp(logits - log_normalizer[..., None])
    p = jnp.where(distance > 0, p, 0.0)
    ds = scale * p * (_product("ltbhe,lbshe->lbhts", do, v) - delta[..., None])
    for_q = for_q + _product("lbhts,lbshe->ltbhe", ds.astype(spec.dtype), k)
    rows = (part.reshape(shape) for part in (for_q, for_own_k, for_own_v))
    return QueryGradients(*rows, delta=jnp.transpose(delta, (0, 3, 2, 1)))


def _heads(rows: Array, spec: LayerSpec) -> Array:
    return rows.reshape(*rows.shape[:-1], -1, spec.head_width)


def _slopes(spec: LayerSpec) -> Array:
    """Returns ALiBi's slopes [H, 1, 1]."""
    return slopes_row(spec)[0][:, None, None]


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
