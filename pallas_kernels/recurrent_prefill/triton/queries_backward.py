"""Gradients of a tile's queries and temporary pairs on GPU: nothing is sequential.

The formulas are in `triton_gradient_attention`.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.recurrent_prefill.tiles.backward import QueryGradients
from pallas_kernels.recurrent_prefill.triton.blocks import dot
from pallas_kernels.recurrent_prefill.triton.launch import (
    Launch,
    launch_kernel,
    power_dividing,
)
from pallas_kernels.recurrent_prefill.triton.prefix import slope_of


def query_gradients(
    launch: Launch, queries, own_k, own_v, keys, values, before
) -> QueryGradients:
    """Returns the cotangents of a tile's queries and temporary pairs, float32.

    Args:
      queries: q, do, attended [L, b, B, H E] and log_normalizer [L, b, H, B].
      own_k, own_v: temporary pairs [L, b, B, K E].
      keys, values: [L, B, S, K E], filled up to and with the tile.
      before: how many slots come before the tile, int32 [L, B].
    """
    spec = launch.spec
    q = queries[0]
    L, b, B, _ = q.shape
    H, E, S = spec.heads, spec.head_width, keys.shape[2]
    G = H // spec.key_heads
    tile = lambda group: pl.BlockSpec(  # noqa: E731
        (None, b, None, E), lambda l, r, h: (l, 0, r, h // group)
    )
    prefix = pl.BlockSpec((None, None, S, E), lambda l, r, h: (l, r, 0, h // G))
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
            *(tile(G), tile(G), prefix, prefix),
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
    log_normalizer_ref,
    own_k_ref,
    own_v_ref,
    k_ref,
    v_ref,
    for_q_ref,
    for_own_k_ref,
    for_own_v_ref,
    delta_ref,
    *,
    spec,
    chunk,
):
    b = q_ref.shape[0]
    before = before_ref[0]
    slope = slope_of(spec, pl.program_id(2))
    scale = spec.logit_scale
    q, do, log_normalizer = q_ref[...], do_ref[...], log_normalizer_ref[...]
    wide_q, wide_do = q.astype(jnp.float32), do.astype(jnp.float32)
    delta = jnp.sum(wide_do * attended_ref[...].astype(jnp.float32), axis=1)
    own_k = own_k_ref[...].astype(jnp.float32)
    own_v = own_v_ref[...].astype(jnp.float32)
    p = jnp.exp(scale * jnp.sum(wide_q * own_k, axis=1) - log_normalizer)
    ds = scale * p * (jnp.sum(wide_do * own_v, axis=1) - delta)
    for_own_k_ref[:] = ds[:, None] * wide_q
    for_own_v_ref[:] = p[:, None] * wide_do
    delta_ref[:] = delta
    t = jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)

    def meet(c, for_q):
        part = pl.ds(c * chunk, chunk)
        k, v = k_ref[part, :], v_ref[part, :]
        at = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
        logits = scale * dot(q, k.T)
        logits = logits - slope * (before + t - at).astype(jnp.float32)
        p = jnp.exp(logits - log_normalizer[:, None])
        p = jnp.where(at < before + t, p, 0.0)
        ds = scale * p * (dot(do, v.T) - delta[:, None])
        return for_q + dot(ds.astype(k.dtype), k)

    chunks = (before + b + chunk - 1) // chunk
    chunks = jnp.minimum(chunks, k_ref.shape[0] // chunk)
    for_q_ref[:] = jax.lax.fori_loop(0, chunks, meet, ds[:, None] * own_k)
