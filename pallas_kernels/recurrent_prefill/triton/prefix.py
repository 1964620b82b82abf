"""A tile's queries against the whole prefix, on GPU.

Keys and values of the prefix are [L, B, S, K E], as in the cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.triton.blocks import dot
from pallas_kernels.recurrent_prefill.triton.launch import (
    Launch,
    launch_kernel,
    power_dividing,
)

HIDDEN = -1e30
"""The logit of a pair that is not seen; a query's own pair is always seen."""


class Running(NamedTuple):
    """A tile's queries after the pairs met so far: float32, by slot.

    Attributes:
      largest: the largest logit, [L, b, H, B].
      normalizer: sum of exp(logit - largest), [L, b, H, B].
      weighted: sum of exp(logit - largest) v, [L, b, B, H E].
    """

    largest: jax.Array
    normalizer: jax.Array
    weighted: jax.Array


def meet_prefix(launch: Launch, q, own_k, own_v, keys, values, before) -> Running:
    """Starts a tile's softmax: each query's temporary pair, then the whole prefix.

    Args:
      q: queries [L, b, B, H E].
      own_k, own_v: temporary pairs [L, b, B, K E].
      keys, values: [L, B, S, K E].
      before: how many slots of each row are filled, int32 [L, B]: query t is at that
        position plus t.
    """
    spec = launch.spec
    L, b, B, _ = q.shape
    H, G, E, S = (
        spec.heads,
        spec.heads // spec.key_heads,
        spec.head_width,
        keys.shape[2],
    )
    tile = lambda group: pl.BlockSpec(  # noqa: E731
        (None, b, None, E), lambda l, r, h: (l, 0, r, h // group)
    )
    prefix = pl.BlockSpec((None, None, S, E), lambda l, r, h: (l, r, 0, h // G))
    scalar = pl.BlockSpec((None, b, None, None), lambda l, r, h: (l, 0, h, r))
    rows = jax.ShapeDtypeStruct((L, b, H, B), jnp.float32)
    out = launch_kernel(
        launch,
        _prefix_kernel,
        *(before, q, own_k, own_v, keys, values),
        grid=(L, B, H),
        in_specs=[
            pl.BlockSpec((None, 1), lambda l, r, h: (l, r)),
            *(tile(1), tile(G), tile(G)),
            *(prefix, prefix),
        ],
        out_specs=[scalar, scalar, tile(1)],
        out_shape=[rows, rows, jax.ShapeDtypeStruct(q.shape, jnp.float32)],
        stages=2,
        spec=spec,
        chunk=power_dividing(S, launch.tiles.keys),
    )
    return Running(*out)


def slope_of(spec: LayerSpec, head: jax.Array) -> jax.Array:
    """Returns ALiBi's slope of a query head, 0 without ALiBi."""
    m = spec.alibi_max_bias
    if m is None:
        return jnp.float32(0.0)
    return jnp.exp2(-m / spec.heads * (head + 1).astype(jnp.float32))


# A program owns the tile's b queries of one row and head: their softmax state stays in
# registers while the row's prefix streams by once, `chunk` pairs at a time. It reads
# 2 before E values and writes b (E + 2): the prefix crosses memory once a tile.
def _prefix_kernel(
    before_ref,
    q_ref,
    own_k_ref,
    own_v_ref,
    k_ref,
    v_ref,
    largest_ref,
    normalizer_ref,
    weighted_ref,
    *,
    spec,
    chunk,
):
    b = q_ref.shape[0]
    before = before_ref[0]
    slope = slope_of(spec, pl.program_id(2))
    q = q_ref[...]
    scaled = q.astype(jnp.float32) * spec.logit_scale
    largest = jnp.sum(scaled * own_k_ref[...].astype(jnp.float32), axis=1)
    start = (largest, jnp.ones(b, jnp.float32), own_v_ref[...].astype(jnp.float32))

    def meet(c, running):
        largest, normalizer, weighted = running
        part = pl.ds(c * chunk, chunk)
        at = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
        t = jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)
        logits = spec.logit_scale * dot(q, k_ref[part, :].T)
        logits = logits - slope * (before + t - at).astype(jnp.float32)
        logits = jnp.where(at < before, logits, HIDDEN)
        above = jnp.maximum(largest, jnp.max(logits, axis=1))
        shrink = jnp.exp(largest - above)
        p = jnp.exp(logits - above[:, None])
        v = v_ref[part, :]
        weighted = weighted * shrink[:, None] + dot(p.astype(v.dtype), v)
        return above, normalizer * shrink + jnp.sum(p, axis=1), weighted

    chunks = (before + chunk - 1) // chunk
    running = jax.lax.fori_loop(0, chunks, meet, start)
    largest_ref[:], normalizer_ref[:], weighted_ref[:] = running
