"""Attention on GPU: a tile's queries over their prefix, a sub-tile's over the tile.

Keys and values of the prefix are [L, B, S, K E], as in the cache. The tile's own pairs
are [L, b + 1, B, K E], position t in slot t + 1. Queries of a sub-tile read pairs of
earlier ones together, as a tile's read the prefix.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import HIDDEN
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    cached_head_spec,
    dot,
    head_scalars_spec,
    head_spec,
    launch_kernel,
    like,
    power_dividing,
    slot_of,
)


class Running(NamedTuple):
    """A tile's queries after the pairs read so far: float32, by slot.

    Attributes:
      largest: the largest logit, [L, b, H, B].
      normalizer: sum of exp(logit - largest), [L, b, H, B].
      weighted: sum of exp(logit - largest) v, [L, b, B, H E].
    """

    largest: jax.Array
    normalizer: jax.Array
    weighted: jax.Array


def attend_prefix(
    launch: Launch,
    q: Float[Array, "L b B HE"],
    own_k: Float[Array, "L b B KE"],
    own_v: Float[Array, "L b B KE"],
    keys: Float[Array, "L B S KE"],
    values: Float[Array, "L B S KE"],
    before: Int[Array, "L B"],
) -> Running:
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
    H, Q, E = spec.heads, spec.heads // spec.key_heads, spec.head_width
    own, prefix = head_spec(b, E, Q), cached_head_spec(keys, E, Q)
    scalar = head_scalars_spec(b)
    rows = jax.ShapeDtypeStruct((L, b, H, B), jnp.float32)
    out = launch_kernel(
        launch,
        _prefix_kernel,
        *(before, q, own_k, own_v, keys, values),
        refs=PrefixRefs,
        grid=(L, B, H),
        in_specs=[
            pl.BlockSpec((None, 1), lambda l, r, h: (l, r)),
            *(head_spec(b, E), own, own),
            *(prefix, prefix),
        ],
        out_specs=[scalar, scalar, head_spec(b, E)],
        out_shape=[rows, rows, jax.ShapeDtypeStruct(q.shape, jnp.float32)],
        # The prefix grows from tile to tile: half of the slots over a whole call.
        reads={4: 0.5, 5: 0.5},
        warps=launch.query_warps(),
        stages=2,
        spec=spec,
        chunk=power_dividing(keys.shape[2], launch.tiles.keys),
    )
    return Running(*out)


def slope_of(spec: LayerSpec, head: jax.Array) -> jax.Array:
    """Returns ALiBi's slope of a query head, 0 without ALiBi."""
    m = spec.alibi_max_bias
    if m is None:
        return jnp.float32(0.0)
    return jnp.exp2(-m / spec.heads * (head + 1).astype(jnp.float32))


class PrefixRefs(NamedTuple):
    """What a program reads, then writes: one row and query head of a tile."""

    before: Any  # [1], filled slots
    q: Any  # [b, E]
    own_k: Any  # [b, E], temporary pairs
    own_v: Any  # [b, E]
    keys: Any  # [S, E]
    values: Any  # [S, E]
    largest: Any  # [b]
    normalizer: Any  # [b]
    weighted: Any  # [b, E]


# A program owns the tile's b queries of one row and head: their softmax state stays in
# registers while the row's prefix streams by once, `chunk` pairs at a time. It reads
# 2 before E values and writes b (E + 2): the prefix crosses memory once a tile.
def _prefix_kernel(refs: PrefixRefs, *, spec, chunk):
    b = refs.q.shape[0]
    before = refs.before[0]
    slope = slope_of(spec, pl.program_id(2))
    q = refs.q[...]
    scaled = q.astype(jnp.float32) * spec.logit_scale
    # Each query's softmax starts with its own temporary pair.
    largest = jnp.sum(scaled * refs.own_k[...].astype(jnp.float32), axis=1)
    start = (largest, jnp.ones(b, jnp.float32), refs.own_v[...].astype(jnp.float32))

    t = before + jax.lax.iota(jnp.int32, b)
    # Padding of a row that is nearly full may stand beyond its slots.
    end = jnp.minimum(before, refs.keys.shape[0])

    def attend_chunk(c, running):
        part = pl.ds(c * chunk, chunk)
        at = c * chunk + jax.lax.iota(jnp.int32, chunk)
        k, v = refs.keys[part, :], refs.values[part, :]
        return _read(running, q, t, k, v, at, end, slope, spec)

    chunks = (end + chunk - 1) // chunk
    running = jax.lax.fori_loop(0, chunks, attend_chunk, start)
    refs.largest[:], refs.normalizer[:], refs.weighted[:] = running


def _read(running, q, t, k, v, at, end, slope, spec):
    """Returns the softmax state of queries [n, E] once they have read some pairs.

    Args:
      t: positions of the queries, [n].
      at: of the pairs, [keys]; those from `end` on, which may hold anything, are not
        seen.
    """
    largest, normalizer, weighted = running
    seen = at < end
    v = jnp.where(seen[:, None], v, jnp.zeros_like(v))
    distance = (t[:, None] - at[None, :]).astype(jnp.float32)
    logits = spec.logit_scale * dot(q, k.T) - slope * distance
    logits = jnp.where(seen[None, :], logits, HIDDEN)
    above = jnp.maximum(largest, jnp.max(logits, axis=1))
    shrink = jnp.exp(largest - above)
    p = jnp.exp(logits - above[:, None])
    weighted = weighted * shrink[:, None] + dot(p.astype(v.dtype), v)
    return above, normalizer * shrink + jnp.sum(p, axis=1), weighted


def attend_earlier(
    launch: Launch,
    first: Int[Array, "1"],
    q: Float[Array, "L b B HE"],
    keys: Float[Array, "L b_and_1 B KE"],
    values: Float[Array, "L b_and_1 B KE"],
    running: Running,
) -> Running:
    """Lets a sub-tile's queries read the pairs of the tile's earlier sub-tiles.

    Args:
      first: the sub-tile's first position in the call. The pair before it is not
        finished yet: positions of the sub-tile read it themselves.
      keys, values: the tile's pairs so far.
      running: after the prefix; written in place where the sub-tile stands.
    """
    spec, sub = launch.spec, launch.tiles.sub_tile
    L, b, B, _ = q.shape
    H, Q, E = spec.heads, spec.heads // spec.key_heads, spec.head_width
    pairs = head_spec(b + 1, E, Q)
    outs = [head_scalars_spec(b), head_scalars_spec(b), head_spec(b, E)]
    share = sub / b
    # Half of the sub-tiles on average.
    earlier = 0.5 * (1.0 - share)
    in_place = dict.fromkeys((4, 5, 6), share)
    written = launch_kernel(
        launch,
        _earlier_kernel,
        *(first, q, keys, values, *running),
        refs=EarlierRefs,
        grid=(L, B, H),
        in_specs=[POSITION, head_spec(b, E), pairs, pairs, *outs],
        out_specs=outs,
        out_shape=[like(part) for part in running],
        aliases={4: 0, 5: 1, 6: 2},
        reads={1: share, 2: earlier, 3: earlier, **in_place},
        writes=dict.fromkeys(range(3), share),
        stages=2,
        spec=spec,
        sub=sub,
    )
    return Running(*written)


class EarlierRefs(NamedTuple):
    """What a program reads, then writes: one row and query head of a sub-tile."""

    first: Any  # [1], the sub-tile's first position
    q: Any  # [b, E]
    keys: Any  # [b + 1, E], pairs of the tile so far
    values: Any  # [b + 1, E]
    old_largest: Any  # the three outputs, which are written in place
    old_normalizer: Any
    old_weighted: Any
    largest: Any  # [b]
    normalizer: Any  # [b]
    weighted: Any  # [b, E]


# As `_prefix_kernel`, with a sub-tile's queries and the tile's pairs before it, a
# sub-tile of them at a time.
def _earlier_kernel(refs: EarlierRefs, *, spec, sub):
    first = slot_of(refs.first[0], refs.q.shape[0])
    slope = slope_of(spec, pl.program_id(2))
    own = pl.ds(first, sub)
    q, t = refs.q[own, :], first + jax.lax.iota(jnp.int32, sub)

    def attend_sub_tile(s, running):
        at = s * sub + jax.lax.iota(jnp.int32, sub)
        # Position 0 lies in slot 1.
        slots = pl.ds(s * sub + 1, sub)
        k, v = refs.keys[slots, :], refs.values[slots, :]
        return _read(running, q, t, k, v, at, first - 1, slope, spec)

    start = (refs.old_largest[own], refs.old_normalizer[own], refs.old_weighted[own, :])
    running = jax.lax.fori_loop(0, first // sub, attend_sub_tile, start)
    refs.largest[own], refs.normalizer[own], refs.weighted[own, :] = running
