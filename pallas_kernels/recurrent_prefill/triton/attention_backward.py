"""Attention's backward on GPU, probabilities rebuilt from the kept log-normalizers.

With p_ij = exp(logit_ij - log_normalizer_i), do_i the cotangent of what i attended to
and delta_i = do_i . attended_i:

    ds_ij = p_ij (do_i . v_j - delta_i);  dv_j = sum_i p_ij do_i
    dk_j = scale sum_i ds_ij q_i;         dq_i = scale sum_j ds_ij k_j

Only dk and dv are sequential: a tile's keys first meet the queries of all later tiles,
then the step of each position meets the later queries of its own tile.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.recurrent_prefill.tiles.backward import LaterQueries, QueryGradients
from pallas_kernels.recurrent_prefill.triton.attention import slope_of
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    dot,
    launch_kernel,
    like,
    power_dividing,
)
from pallas_kernels.recurrent_prefill.triton.products_backward import shape_of_sums


def later_queries_backward(
    launch: Launch, keys, values, later: LaterQueries, first, at
):
    """Returns dk, dv [L, b, B, K E] of b keys from the queries at `first` and later.

    Args:
      keys, values: [L, b, B, K E].
      first: index of the first query that counts, int32 [L, B], a multiple of the tile.
      at: index of key 0 among the queries' positions, int32 [L, B]; keys at `first` or
        beyond count for nothing.
    """
    spec = launch.spec
    L, b, B, _ = keys.shape
    K, E, T = spec.key_heads, spec.head_width, later.q.shape[2]
    Q = spec.heads // K
    tile = pl.BlockSpec((None, b, None, E), lambda l, r, h: (l, 0, r, h))
    queries = pl.BlockSpec((None, None, T, Q * E), lambda l, r, h: (l, r, 0, h))
    scalars = pl.BlockSpec((None, None, Q, T), lambda l, r, h: (l, r, h, 0))
    one = pl.BlockSpec((None, 1), lambda l, r, h: (l, r))
    return launch_kernel(
        launch,
        _later_queries_kernel,
        *(first, at, keys, values, *later),
        grid=(L, B, K),
        in_specs=[one, one, tile, tile, queries, queries, scalars, scalars],
        out_specs=[tile, tile],
        out_shape=[jax.ShapeDtypeStruct(keys.shape, jnp.float32)] * 2,
        stages=2,
        spec=spec,
        chunk=min(launch.tiles.tile, launch.tiles.keys),
    )


def own_tile_backward(launch: Launch, t, dk, dv, pairs, queries, unit_k, scale):
    """Adds to dk[t], dv[t] what the tile's later queries say: a step's first kernel.

    Args:
      dk, dv: float32 [L, b, B, K E], written in place.
      pairs: persistent keys and values [L, b, B, K E].
      queries: q, do, attended [L, b, B, H E] and lse [L, b, H, B].
      unit_k, scale: of the k-norm, for the sums that its backward needs.
    """
    spec, block = launch.spec, launch.tiles.attend_rows
    L, b, B, KE = dk.shape
    K, E = spec.key_heads, spec.head_width
    Q = spec.heads // K
    heads = lambda width: pl.BlockSpec(  # noqa: E731
        (None, b, block, width), lambda l, i, h: (l, 0, i, h)
    )
    scalar = pl.BlockSpec((None, b, Q, block), lambda l, i, h: (l, 0, h, i))
    sums = jax.ShapeDtypeStruct(shape_of_sums(L, K, B), jnp.float32)
    return launch_kernel(
        launch,
        _own_tile_kernel,
        *(t, *pairs, *queries, unit_k, scale, dk, dv),
        grid=(L, B // block, K),
        in_specs=[
            POSITION,
            *(heads(E), heads(E)),
            *(heads(Q * E), heads(Q * E), heads(Q * E), scalar),
            heads(E),
            pl.BlockSpec((None, E), lambda l, i, h: (l, h)),
            *(heads(E), heads(E)),
        ],
        out_specs=[
            *(heads(E), heads(E)),
            pl.BlockSpec((None, None, 2, block), lambda l, i, h: (l, h, 0, i)),
        ],
        out_shape=[like(dk), like(dv), sums],
        aliases={9: 0, 10: 1},
        spec=spec,
    )


# A program owns b keys of one row and key head; dk and dv stay in registers while the
# later queries stream by once.
def _later_queries_kernel(
    first_ref,
    at_ref,
    k_ref,
    v_ref,
    q_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    *,
    spec,
    chunk,
):
    b, E = k_ref.shape
    Q, T = lse_ref.shape
    first, at = first_ref[0], at_ref[0]
    k, v = k_ref[...], v_ref[...]
    key = at + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)
    slopes = [slope_of(spec, pl.program_id(2) * Q + g) for g in range(Q)]

    def attend_chunk(c, totals):
        dk, dv = totals
        part = pl.ds(c * chunk, chunk)
        query = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
        for g in range(Q):
            heads = pl.ds(g * E, E)
            q, do = q_ref[part, heads], do_ref[part, heads]
            logits = spec.logit_scale * dot(k, q.T)
            logits = logits - slopes[g] * (query - key).astype(jnp.float32)
            p = jnp.exp(logits - lse_ref[g, part][None, :])
            p = jnp.where((key < first) & (query >= first), p, 0.0)
            ds = p * (dot(v, do.T) - delta_ref[g, part][None, :])
            dv = dv + dot(p.astype(do.dtype), do)
            dk = dk + dot((spec.logit_scale * ds).astype(q.dtype), q)
        return dk, dv

    zero = jnp.zeros((b, E), jnp.float32)
    dk, dv = jax.lax.fori_loop(first // chunk, T // chunk, attend_chunk, (zero, zero))
    dk_ref[:], dv_ref[:] = dk, dv


# A program owns one key head's pair of a few rows at position t; it reads the tile's
# queries after t once.
def _own_tile_kernel(
    t_ref,
    k_ref,
    v_ref,
    q_ref,
    do_ref,
    attended_ref,
    lse_ref,
    unit_ref,
    scale_ref,
    dk_in_ref,
    dv_in_ref,
    dk_ref,
    dv_ref,
    sums_ref,
    *,
    spec,
):
    t = t_ref[0]
    b, rows, E = k_ref.shape
    Q = lse_ref.shape[1]
    k, v = k_ref[t].astype(jnp.float32), v_ref[t].astype(jnp.float32)
    dk, dv = dk_in_ref[t], dv_in_ref[t]
    at = jax.lax.broadcasted_iota(jnp.int32, (b, rows), 0)
    later = at > t
    read = jnp.broadcast_to(later[:, :, None], (b, rows, E))

    def load(ref, heads):
        part = pltriton.load(ref.at[:, :, heads], mask=read, other=0.0)
        return part.astype(jnp.float32)

    for g in range(Q):
        heads = pl.ds(g * E, E)
        slope = slope_of(spec, pl.program_id(2) * Q + g)
        q, do = load(q_ref, heads), load(do_ref, heads)
        delta = jnp.sum(do * load(attended_ref, heads), axis=2)
        logits = spec.logit_scale * jnp.sum(q * k[None], axis=2)
        logits = logits - slope * (at - t).astype(jnp.float32)
        p = jnp.where(later, jnp.exp(logits - lse_ref[:, g, :]), 0.0)
        ds = p * (jnp.sum(do * v[None], axis=2) - delta)
        dv = dv + jnp.sum(p[:, :, None] * do, axis=0)
        dk = dk + spec.logit_scale * jnp.sum(ds[:, :, None] * q, axis=0)
    dk_ref[t], dv_ref[t] = dk, dv
    scaled = dk * scale_ref[...][None, :]
    sums_ref[0, :] = jnp.sum(scaled * unit_ref[t], axis=1)
    sums_ref[1, :] = jnp.sum(scaled, axis=1)


def queries_backward(
    launch: Launch, queries, own_k, own_v, keys, values, before
) -> QueryGradients:
    """Returns the cotangents of a tile's queries and temporary pairs, float32.

    Args:
      queries: q, do, attended [L, b, B, H E] and lse [L, b, H, B].
      own_k, own_v: temporary pairs [L, b, B, K E].
      keys, values: [L, B, S, K E], filled up to and with the tile.
      before: how many slots come before the tile, int32 [L, B].
    """
    spec = launch.spec
    q = queries[0]
    L, b, B, _ = q.shape
    H, E, S = spec.heads, spec.head_width, keys.shape[2]
    Q = H // spec.key_heads
    tile = lambda group: pl.BlockSpec(  # noqa: E731
        (None, b, None, E), lambda l, r, h: (l, 0, r, h // group)
    )
    prefix = pl.BlockSpec((None, None, S, E), lambda l, r, h: (l, r, 0, h // Q))
    scalar = pl.BlockSpec((None, b, None, None), lambda l, r, h: (l, 0, h, r))
    rows = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    out = launch_kernel(
        launch,
        _query_kernel,
        *(before, *queries, own_k, own_v, keys, values),
        grid=(L, B, H),
        in_specs=[
            pl.BlockSpec((None, 1), lambda l, r, h: (l, r)),
            *(tile(1), tile(1), tile(1), scalar),
            *(tile(Q), tile(Q), prefix, prefix),
        ],
        out_specs=[tile(1), tile(1), tile(1), scalar],
        out_shape=[rows, rows, rows, jax.ShapeDtypeStruct((L, b, H, B), jnp.float32)],
        stages=2,
        spec=spec,
        chunk=power_dividing(S, launch.tiles.keys),
    )
    return QueryGradients(*out)


# A program owns the b queries of one row and head; dq stays in registers while the
# row's pairs up to the tile's end stream by once.
def _query_kernel(
    before_ref,
    q_ref,
    do_ref,
    attended_ref,
    lse_ref,
    own_k_ref,
    own_v_ref,
    k_ref,
    v_ref,
    dq_ref,
    dk_own_ref,
    dv_own_ref,
    delta_ref,
    *,
    spec,
    chunk,
):
    b = q_ref.shape[0]
    before = before_ref[0]
    slope = slope_of(spec, pl.program_id(2))
    scale = spec.logit_scale
    q, do, lse = q_ref[...], do_ref[...], lse_ref[...]
    wide_q, wide_do = q.astype(jnp.float32), do.astype(jnp.float32)
    delta = jnp.sum(wide_do * attended_ref[...].astype(jnp.float32), axis=1)
    own_k = own_k_ref[...].astype(jnp.float32)
    own_v = own_v_ref[...].astype(jnp.float32)
    p = jnp.exp(scale * jnp.sum(wide_q * own_k, axis=1) - lse)
    ds = scale * p * (jnp.sum(wide_do * own_v, axis=1) - delta)
    dk_own_ref[:] = ds[:, None] * wide_q
    dv_own_ref[:] = p[:, None] * wide_do
    delta_ref[:] = delta
    t = jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)

    def attend_chunk(c, dq):
        part = pl.ds(c * chunk, chunk)
        k, v = k_ref[part, :], v_ref[part, :]
        at = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
        logits = scale * dot(q, k.T)
        logits = logits - slope * (before + t - at).astype(jnp.float32)
        p = jnp.exp(logits - lse[:, None])
        p = jnp.where(at < before + t, p, 0.0)
        ds = scale * p * (dot(do, v.T) - delta[:, None])
        return dq + dot(ds.astype(k.dtype), k)

    chunks = (before + b + chunk - 1) // chunk
    chunks = jnp.minimum(chunks, k_ref.shape[0] // chunk)
    dq_ref[:] = jax.lax.fori_loop(0, chunks, attend_chunk, ds[:, None] * own_k)
