"""Attention on GPU: a tile's queries over their prefix, a sub-tile's over the tile.

Keys and values of the prefix are [L, B, S, K E], as in the cache. The tile's own pairs
are [L, b + 1, B, K E], position t in slot t + 1: slot 0 takes what position 0 writes
before there is anything to write. Queries of a sub-tile read pairs of earlier ones
together, as a tile's read the prefix; a position then reads the pairs of its sub-tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import Array
from pallas_kernels.recurrent_prefill.equations import HIDDEN
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    Position,
    cached_head_spec,
    dot,
    head_scalars_spec,
    head_spec,
    launch_kernel,
    like,
    one_slot,
    power_dividing,
    slope_of,
    slot_of,
)
from pallas_kernels.recurrent_prefill.triton.products import (
    read_spec,
    read_statistics,
)


class TileSoftmax(NamedTuple):
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
) -> TileSoftmax:
    """Starts a tile's softmax: each query's temporary pair, then the full prefix.

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
    queries, prefix = head_spec(b, E, Q), cached_head_spec(keys, E, Q)
    scalar = head_scalars_spec(b)
    rows = jax.ShapeDtypeStruct((L, b, H, B), jnp.float32)
    out = launch_kernel(
        launch,
        _prefix_kernel,
        before,
        q,
        own_k,
        own_v,
        keys,
        values,
        refs=PrefixRefs,
        grid=(L, B, H),
        in_specs=[
            pl.BlockSpec((None, 1), lambda l, r, h: (l, r)),
            head_spec(b, E),
            queries,
            queries,
            prefix,
            prefix,
        ],
        out_specs=[scalar, scalar, head_spec(b, E)],
        out_shape=[rows, rows, jax.ShapeDtypeStruct(q.shape, jnp.float32)],
        # The prefix grows from tile to tile: half of the slots over a full call.
        reads={4: 0.5, 5: 0.5},
        warps=launch.query_warps(),
        stages=2,
        spec=spec,
        chunk=power_dividing(keys.shape[2], launch.tiles.keys),
    )
    return TileSoftmax(*out)


class PrefixRefs(NamedTuple):
    """A program's inputs, then outputs: one row and query head of a tile."""

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
      at: positions of the pairs, [keys]; pairs from `end` on, which may hold anything,
        are masked.
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
    running: TileSoftmax,
) -> TileSoftmax:
    """Lets a sub-tile's queries read the pairs of the tile's earlier sub-tiles.

    Args:
      first: the sub-tile's first position in the call. The pair before it is not
        finished yet: positions of the sub-tile read it themselves.
      keys, values: the tile's pairs so far.
      running: after the prefix; written in place at the sub-tile's slots.
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
        first,
        q,
        keys,
        values,
        *running,
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
    return TileSoftmax(*written)


class EarlierRefs(NamedTuple):
    """A program's inputs, then outputs: one row and query head of a sub-tile."""

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
    rows = pl.ds(first, sub)
    q, t = refs.q[rows, :], first + jax.lax.iota(jnp.int32, sub)

    def attend_sub_tile(s, running):
        at = s * sub + jax.lax.iota(jnp.int32, sub)
        # Position 0 is in slot 1.
        slots = pl.ds(s * sub + 1, sub)
        k, v = refs.keys[slots, :], refs.values[slots, :]
        return _read(running, q, t, k, v, at, first - 1, slope, spec)

    start = (
        refs.old_largest[rows],
        refs.old_normalizer[rows],
        refs.old_weighted[rows, :],
    )
    running = jax.lax.fori_loop(0, first // sub, attend_sub_tile, start)
    refs.largest[rows], refs.normalizer[rows], refs.weighted[rows, :] = running


class TileState(NamedTuple):
    """The arrays that the positions of a tile write, each in its own slot.

    Attributes:
      attended: [L, slots, B, H E], slots of a tile or of all positions.
      lse: [L, slots, H, B].
      keys, values: persistent pairs, [L, b + 1, B, K E].
    """

    attended: jax.Array
    lse: jax.Array
    keys: jax.Array
    values: jax.Array


def attend(
    launch: Launch,
    t: Position,
    q: Float[Array, "L b B HE"],
    running: TileSoftmax,
    pairs: Float[Array, "L B KE_and_KE"],
    statistics: Float[Array, "L programs 2 B"],
    columns: int,
    norm: tuple[Float[Array, "L KE"], Float[Array, "L KE"]],
    state: TileState,
) -> TileState:
    """Finishes the pair of position t - 1, then attends at position t.

    Args:
      pairs: pairs of position t - 1 before k-norm, float32 [L, B, 2 K E].
      statistics: row statistics of `pairs`, whose keys fill programs of `columns`
        columns.
      norm: scale and bias of the k-norm, [L, K E].
      state: written in place: attended and lse of t, and the pair of t - 1.
    """
    spec, block = launch.spec, launch.tiles.attend_rows
    L, b, B, _ = q.shape
    K, Q, E = spec.key_heads, spec.heads // spec.key_heads, spec.head_width
    heads = lambda slots, width, first=0: pl.BlockSpec(  # noqa: E731
        (None, slots, block, width), lambda l, i, h: (l, 0, i, first + h)
    )
    scalar = lambda slots: pl.BlockSpec(  # noqa: E731
        (None, slots, Q, block), lambda l, i, h: (l, 0, h, i)
    )
    raw = lambda first: pl.BlockSpec(  # noqa: E731
        (None, block, E), lambda l, i, h: (l, i, first + h)
    )
    vector = pl.BlockSpec((None, E), lambda l, i, h: (l, h))
    slots = state.attended.shape[1]
    outs = [heads(slots, Q * E), scalar(slots), heads(b + 1, E), heads(b + 1, E)]
    half = 0.5 * launch.tiles.sub_tile / b
    written = launch_kernel(
        launch,
        _attend_kernel,
        *t,
        q,
        *running,
        pairs,
        pairs,
        statistics,
        *norm,
        *state,
        refs=AttendRefs,
        grid=(L, B // block, K),
        in_specs=[
            POSITION,
            POSITION,
            heads(b, Q * E),
            scalar(b),
            scalar(b),
            heads(b, Q * E),
            raw(0),
            raw(K),
            read_spec(statistics, block),
            vector,
            vector,
            *outs,
        ],
        out_specs=outs,
        out_shape=[like(part) for part in state],
        aliases={11: 0, 12: 1, 13: 2, 14: 3},
        # One query with its state, and half of a sub-tile's pairs on average.
        reads={**dict.fromkeys((2, 3, 4, 5), one_slot(q)), 13: half, 14: half},
        writes={n: one_slot(part) for n, part in enumerate(state)},
        spec=spec,
        columns=columns,
        sub=launch.tiles.sub_tile,
    )
    return TileState(*written)


class AttendRefs(NamedTuple):
    """The attention step's inputs, then outputs: rows of one key head."""

    first: Any  # [1], [1]: the position
    behind: Any
    q: Any  # [b, rows, Q E]
    largest: Any  # [b, Q, rows], softmax state after the prefix
    normalizer: Any  # [b, Q, rows]
    weighted: Any  # [b, rows, Q E]
    raw_k: Any  # [rows, E], position t - 1 before its k-norm, float32
    raw_v: Any  # [rows, E]
    statistics: Any  # [programs, 2, rows], of all of the raw keys
    scale: Any  # [E], of the k-norm
    shift: Any  # [E]
    old_attended: Any  # the four outputs, which are written in place
    old_lse: Any
    keys: Any  # [b + 1, rows, E], pairs of the tile so far
    values: Any  # [b + 1, rows, E]
    attended: Any  # [slots, rows, Q E]
    lse: Any  # [slots, Q, rows]
    new_k: Any  # [b + 1, rows, E]
    new_v: Any  # [b + 1, rows, E]


# A program owns a few rows of one key head and its Q query heads. It normalises the
# pair that the step before projected, writes it, and merges three parts of the softmax:
# the running one (temporary pair, prefix, earlier sub-tiles), the sub-tile's earlier
# pairs with the one right before it, and the new pair. Everything it touches crosses
# memory once: up to `sub` pairs, one query and its state.
def _attend_kernel(refs: AttendRefs, *, spec, columns, sub):
    position = Position(refs.first, refs.behind)
    t, at = position.slot(refs.q), position.slot(refs.attended)
    Q, E = refs.largest.shape[1], spec.head_width
    rows = refs.raw_k.shape[0]
    # 1. The k-norm of position t - 1, whose sums are complete only now, and its pair.
    subtracted, factor = read_statistics(
        refs.statistics,
        width=spec.key_heads * E,
        columns=columns,
        kind=spec.qk_norm,
        eps=spec.qk_norm_eps,
    )
    k = (refs.raw_k[...] - subtracted[:, None]) * factor[:, None]
    k = k * refs.scale[...][None, :] + refs.shift[...][None, :]
    new_k, new_v = k.astype(refs.new_k.dtype), refs.raw_v[...].astype(refs.new_v.dtype)
    refs.new_k[t], refs.new_v[t] = new_k, new_v
    new_k, new_v = new_k.astype(jnp.float32), new_v.astype(jnp.float32)

    # 2. Earlier pairs; the one written just now is taken from registers. Slots from the
    # sub-tile's first position on hold the pairs from the position before it on.
    first = slot_of(refs.first[0], refs.q.shape[0])
    earlier_t = first - 1 + jax.lax.broadcasted_iota(jnp.int32, (sub, rows), 0)
    seen = (earlier_t >= 0) & (earlier_t < t - 1)
    read = jnp.broadcast_to(seen[:, :, None], (sub, rows, E))
    earlier = pl.ds(first, sub)
    load = lambda ref: pltriton.load(ref.at[earlier], mask=read, other=0.0)  # noqa: E731
    keys = load(refs.keys).astype(jnp.float32)
    values = load(refs.values).astype(jnp.float32)
    for g in range(Q):
        # 3. Softmax over the prefix's state, those pairs and the newest one.
        heads = pl.ds(g * E, E)
        slope = slope_of(spec, pl.program_id(2) * Q + g)
        q = refs.q[t, :, heads].astype(jnp.float32) * spec.logit_scale
        logits = jnp.sum(q[None] * keys, axis=2)
        logits = logits - slope * (t - earlier_t).astype(jnp.float32)
        logits = jnp.where(seen, logits, HIDDEN)
        newest = jnp.where(t > 0, jnp.sum(q * new_k, axis=1) - slope, HIDDEN)
        largest = refs.largest[t, g, :]
        above = jnp.maximum(jnp.max(logits, axis=0), jnp.maximum(newest, largest))
        shrink = jnp.exp(largest - above)
        p = jnp.exp(logits - above[None, :])
        p_newest = jnp.exp(newest - above)
        normalizer = refs.normalizer[t, g, :] * shrink + jnp.sum(p, axis=0) + p_newest
        weighted = refs.weighted[t, :, heads] * shrink[:, None]
        weighted = weighted + jnp.sum(p[:, :, None] * values, axis=0)
        weighted = weighted + jnp.where(t > 0, p_newest[:, None] * new_v, 0.0)
        attended = weighted / normalizer[:, None]
        refs.attended[at, :, heads] = attended.astype(refs.attended.dtype)
        refs.lse[at, g, :] = above + jnp.log(normalizer)
