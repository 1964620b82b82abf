"""Attention on GPU: a position over the pairs of its sub-tile.

The tile's own pairs are [L, b + 1, B, K E], position t in slot t + 1: slot 0 takes what
position 0 writes before there is anything to write.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import HIDDEN
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    Position,
    launch_kernel,
    like,
    one_slot,
    slot_of,
)
from pallas_kernels.recurrent_prefill.triton.norms import (
    read_spec,
    read_statistics,
)
from pallas_kernels.recurrent_prefill.triton.prefix import Running, slope_of


class TileState(NamedTuple):
    """What the positions of a tile write, each its own slot.

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
    running: Running,
    pairs: Float[Array, "L B KE_and_KE"],
    statistics: Float[Array, "L programs 2 B"],
    columns: int,
    norm: tuple[Float[Array, "L KE"], Float[Array, "L KE"]],
    state: TileState,
) -> TileState:
    """Finishes the pair of position t - 1, then attends at position t.

    Args:
      pairs: of position t - 1 before k-norm, float32 [L, B, 2 K E].
      statistics: of `pairs`, whose keys fill programs of `columns` columns.
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
        *(*t, q, *running, pairs, pairs, statistics, *norm, *state),
        refs=AttendRefs,
        grid=(L, B // block, K),
        in_specs=[
            *(POSITION, POSITION),
            *(heads(b, Q * E), scalar(b), scalar(b), heads(b, Q * E)),
            *(raw(0), raw(K), read_spec(statistics, block)),
            *(vector, vector),
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
    """What a program of the attention step reads, then writes: rows of one key head."""

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
