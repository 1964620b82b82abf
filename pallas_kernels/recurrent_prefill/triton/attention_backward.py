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

from pallas_kernels.recurrent_prefill.tiles.backward import LaterQueries
from pallas_kernels.recurrent_prefill.triton.blocks import dot
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    launch_kernel,
    like,
)
from pallas_kernels.recurrent_prefill.triton.prefix import slope_of
from pallas_kernels.recurrent_prefill.triton.products_backward import shape_of_sums


def meet_later_queries(launch: Launch, keys, values, later: LaterQueries, first, at):
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
    G = spec.heads // K
    tile = pl.BlockSpec((None, b, None, E), lambda l, r, h: (l, 0, r, h))
    queries = pl.BlockSpec((None, None, T, G * E), lambda l, r, h: (l, r, 0, h))
    scalars = pl.BlockSpec((None, None, G, T), lambda l, r, h: (l, r, h, 0))
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


def meet_own_tile(launch: Launch, t, for_k, for_v, pairs, queries, unit_k, scale):
    """Adds to dk[t], dv[t] what the tile's later queries say: a step's first kernel.

    Args:
      for_k, for_v: float32 [L, b, B, K E], written in place.
      pairs: persistent keys and values [L, b, B, K E].
      queries: q, do, attended [L, b, B, H E] and log_normalizer [L, b, H, B].
      unit_k, scale: of the k-norm, for the sums that its backward needs.
    """
    spec, block = launch.spec, launch.tiles.attend_rows
    L, b, B, KE = for_k.shape
    K, E = spec.key_heads, spec.head_width
    G = spec.heads // K
    heads = lambda width: pl.BlockSpec(  # noqa: E731
        (None, b, block, width), lambda l, i, h: (l, 0, i, h)
    )
    scalar = pl.BlockSpec((None, b, G, block), lambda l, i, h: (l, 0, h, i))
    sums = jax.ShapeDtypeStruct(shape_of_sums(L, K, B), jnp.float32)
    return launch_kernel(
        launch,
        _own_tile_kernel,
        *(t, *pairs, *queries, unit_k, scale, for_k, for_v),
        grid=(L, B // block, K),
        in_specs=[
            POSITION,
            *(heads(E), heads(E)),
            *(heads(G * E), heads(G * E), heads(G * E), scalar),
            heads(E),
            pl.BlockSpec((None, E), lambda l, i, h: (l, h)),
            *(heads(E), heads(E)),
        ],
        out_specs=[
            *(heads(E), heads(E)),
            pl.BlockSpec((None, None, 2, block), lambda l, i, h: (l, h, 0, i)),
        ],
        out_shape=[like(for_k), like(for_v), sums],
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
    log_normalizer_ref,
    delta_ref,
    for_k_ref,
    for_v_ref,
    *,
    spec,
    chunk,
):
    b, E = k_ref.shape
    G, T = log_normalizer_ref.shape
    first, at = first_ref[0], at_ref[0]
    k, v = k_ref[...], v_ref[...]
    key = at + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)
    slopes = [slope_of(spec, pl.program_id(2) * G + g) for g in range(G)]

    def meet(c, totals):
        for_k, for_v = totals
        part = pl.ds(c * chunk, chunk)
        query = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
        for g in range(G):
            heads = pl.ds(g * E, E)
            q, do = q_ref[part, heads], do_ref[part, heads]
            logits = spec.logit_scale * dot(k, q.T)
            logits = logits - slopes[g] * (query - key).astype(jnp.float32)
            p = jnp.exp(logits - log_normalizer_ref[g, part][None, :])
            p = jnp.where((key < first) & (query >= first), p, 0.0)
            ds = p * (dot(v, do.T) - delta_ref[g, part][None, :])
            for_v = for_v + dot(p.astype(do.dtype), do)
            for_k = for_k + dot((spec.logit_scale * ds).astype(q.dtype), q)
        return for_k, for_v

    zero = jnp.zeros((b, E), jnp.float32)
    for_k, for_v = jax.lax.fori_loop(first // chunk, T // chunk, meet, (zero, zero))
    for_k_ref[:], for_v_ref[:] = for_k, for_v


# A program owns one key head's pair of a few rows at position t; it reads the tile's
# queries after t once.
def _own_tile_kernel(
    t_ref,
    k_ref,
    v_ref,
    q_ref,
    do_ref,
    attended_ref,
    log_normalizer_ref,
    unit_ref,
    scale_ref,
    for_k_in_ref,
    for_v_in_ref,
    for_k_ref,
    for_v_ref,
    sums_ref,
    *,
    spec,
):
    t = t_ref[0]
    b, rows, E = k_ref.shape
    G = log_normalizer_ref.shape[1]
    k, v = k_ref[t].astype(jnp.float32), v_ref[t].astype(jnp.float32)
    for_k, for_v = for_k_in_ref[t], for_v_in_ref[t]
    at = jax.lax.broadcasted_iota(jnp.int32, (b, rows), 0)
    later = at > t
    read = jnp.broadcast_to(later[:, :, None], (b, rows, E))

    def load(ref, heads):
        part = pltriton.load(ref.at[:, :, heads], mask=read, other=0.0)
        return part.astype(jnp.float32)

    for g in range(G):
        heads = pl.ds(g * E, E)
        slope = slope_of(spec, pl.program_id(2) * G + g)
        q, do = load(q_ref, heads), load(do_ref, heads)
        delta = jnp.sum(do * load(attended_ref, heads), axis=2)
        logits = spec.logit_scale * jnp.sum(q * k[None], axis=2)
        logits = logits - slope * (at - t).astype(jnp.float32)
        p = jnp.where(later, jnp.exp(logits - log_normalizer_ref[:, g, :]), 0.0)
        ds = p * (jnp.sum(do * v[None], axis=2) - delta)
        for_v = for_v + jnp.sum(p[:, :, None] * do, axis=0)
        for_k = for_k + spec.logit_scale * jnp.sum(ds[:, :, None] * q, axis=0)
    for_k_ref[t], for_v_ref[t] = for_k, for_v
    scaled = for_k * scale_ref[...][None, :]
    sums_ref[0, :] = jnp.sum(scaled * unit_ref[t], axis=1)
    sums_ref[1, :] = jnp.sum(scaled, axis=1)
