"""The forward loop on GPU: tiles of positions, five kernels per position.

A step takes one tile of each of L layers, layer l a tile behind layer l - 1 (L = 1 when
the layers run one after the other). Its queries first attend to the prefix; then a loop
runs through its sub-tiles, whose queries attend to the earlier ones, and through their
positions; then the tile's persistent pairs join the prefix.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import Array
from pallas_kernels.recurrent_prefill.equations import PreparedWeights, norm_and_rotate
from pallas_kernels.recurrent_prefill.tiles.layout import (
    Active,
    Vectors,
    put_in_order,
    put_in_slots,
    queries_and_pairs,
)
from pallas_kernels.recurrent_prefill.triton.attention import (
    TileState,
    attend,
    attend_earlier,
    attend_prefix,
)
from pallas_kernels.recurrent_prefill.triton.launch import Launch, Position
from pallas_kernels.recurrent_prefill.triton.products import (
    ColumnSplit,
    Folded,
    add_product,
    hidden_product,
    pair_columns,
    pair_product,
    shape_of_statistics,
)

NO_PAD = ((0, 0), (0, 0))


class TritonOutputs(NamedTuple):
    """The results of L layers.

    Attributes:
      z: [L, T, B, D].
      attended: [L, T, B, H E].
      lse: [L, T, H, B].
      keys, values: with the new pairs in their slots, [L, B, S, K E].
    """

    z: Array
    attended: Array
    lse: Array
    keys: Array
    values: Array


def run_layers(
    launch: Launch,
    x: Float[Array, "T B D"],
    w: PreparedWeights,
    keys: Float[Array, "L B S KE"],
    values: Float[Array, "L B S KE"],
    start: Int[Array, " B"],
    *,
    training: bool,
    run_tile: Callable[..., "Tile"],
) -> TritonOutputs:
    """Runs x [T, B, D] through the layers of `w`, all at once.

    Args:
      keys, values: [L, B, S, K E], filled up to each row's `start`; the new pairs of
        position t go to slot start + t, and are dropped where there is none.
      start: how many positions each row has seen, [B].
      training: whether the call has no cache.
      run_tile: the loop through a tile.
    """
    b, L = launch.tiles.tile, w.w_kv.shape[0]
    T, B, D = x.shape
    # One layer runs its full tiles in the loop and the rest after it, so that no kernel
    # is launched for padding. A wavefront pads the last tile: layers overlap.
    full = T // b if L == 1 else -(-T // b)
    tiles = jnp.pad(x[: full * b], ((0, (full * b) - min(T, full * b)), *NO_PAD))
    tiles = tiles.reshape(full, 1, b, B, D)
    late = jnp.zeros((L - 1, *tiles.shape[1:]), x.dtype)

    def put(slots, state: TileState, done: Array, active: Array):
        pairs = (state.keys, state.values)
        if training and L == 1:
            return put_in_order(slots, pairs, done[0], T)
        return put_in_slots(slots, pairs, start, done, active, T)

    def step(carry, inputs):
        below, keys, values = carry
        j, tile = inputs
        tile = jnp.concatenate([tile, below[:-1]]) if L > 1 else tile
        # Layer l is at tile j - l. Before its first and after its last tile its kernels
        # do nothing, and what comes of it is dropped.
        index = j - jnp.arange(L)
        active = (index >= 0) & (index < full)
        done = jnp.where(active, index * b, 0)
        now = replace(launch, active=Active.at(index, full))
        out = run_tile(now, tile, w, keys, values, start, done, b)
        caches = put((keys, values), out.state, done, active)
        return (out.z, *caches), (out.z, out.state.attended, out.state.lse)

    below = jnp.zeros((L, b, B, D), x.dtype)
    (_, keys, values), rows = jax.lax.scan(
        step,
        (below, keys, values),
        (jnp.arange(full + L - 1), jnp.concatenate([tiles, late])),
    )
    rows = tuple(_unskew(part, full) for part in rows)
    count = T - full * b
    if count > 0:
        rest = jnp.pad(x[full * b :], ((0, b - count), *NO_PAD))[None]
        done = jnp.full(1, full * b)
        out = run_tile(launch, rest, w, keys, values, start, done, count)
        keys, values = put((keys, values), out.state, done, done >= 0)
        last = (out.z, out.state.attended, out.state.lse)
        rows = tuple(
            jnp.concatenate([part, new], axis=1)
            for part, new in zip(rows, last, strict=True)
        )
    z, attended, lse = (part[:, :T] for part in rows)
    return TritonOutputs(z, attended, lse, keys, values)


class Tile(NamedTuple):
    """The results of the loop through a tile: z [L, b, B, D], and attention's state.

    Its keys and values are those of the tile's positions, [L, b, B, K E].
    """

    z: Array
    state: TileState


class Buffers(NamedTuple):
    """The buffers that positions write and read, reused for every tile.

    Attributes:
      z: [L, slots, B, D], slots of a tile or of all positions.
      state: attention's; its attended rows and lse have slots of their own number.
      y: [L, 1, B, D].
      pairs: pair of the position before, without the k-norm, float32 [L, B, 2 K E].
      statistics: row statistics of `pairs`.
      finished: counters of the two products that are split.
    """

    z: Array
    state: TileState
    y: Array
    pairs: Array
    statistics: Array
    finished: tuple[Array, Array]

    @classmethod
    def of(
        cls,
        launch: Launch,
        x: Float[Array, "L slots B D"],
        w: PreparedWeights,
        *,
        attended_slots: int,
    ) -> "Buffers":
        """Makes those of layers with inputs like x."""
        spec, b = launch.spec, launch.tiles.tile
        L, _, B, D = x.shape
        HE, KE = w.w_out.shape[1], w.w_kv.shape[2] // 2
        columns = pair_columns(launch, L, B, 2 * KE)
        statistics = shape_of_statistics(L, 2 * KE // columns, B)
        keys, values = (
            launch.unwritten((L, b + 1, B, KE), spec.dtype) for _ in range(2)
        )
        splits = _splits(launch, w, B)
        return cls(
            z=launch.unwritten(x.shape, x.dtype),
            state=TileState(
                attended=launch.unwritten((L, attended_slots, B, HE), spec.dtype),
                lse=launch.unwritten((L, attended_slots, spec.heads, B), jnp.float32),
                keys=keys,
                values=values,
            ),
            y=launch.unwritten((L, 1, B, D), x.dtype),
            pairs=launch.unwritten((L, B, 2 * KE), jnp.float32),
            statistics=launch.unwritten(statistics.shape, statistics.dtype),
            finished=(
                splits[0].none_finished(launch, w.w_out, B),
                splits[1].none_finished(launch, w.w_down, B),
            ),
        )

    def pairs_so_far(self) -> tuple[Array, Array]:
        """Returns the tile's keys and values before the last one's, [L, b, B, K E]."""
        return self.state.keys[:, 1:], self.state.values[:, 1:]


def _splits(
    launch: Launch, w: PreparedWeights, batch: int
) -> tuple[ColumnSplit, ColumnSplit]:
    return ColumnSplit.of(launch, w.w_out, batch), ColumnSplit.of(
        launch, w.w_down, batch
    )


def run_layer(
    folded: Folded | None,
    launch: Launch,
    x: Float[Array, "T B D"],
    w: PreparedWeights,
    keys: Float[Array, "1 B S KE"],
    values: Float[Array, "1 B S KE"],
    start: Int[Array, " B"],
    *,
    training: bool,
    residuals: bool,
) -> TritonOutputs:
    """Like `run_layers` for one layer, a tile after the other.

    Positions read x and write z in place. Except for the rows that become q, k and v,
    nothing is sliced, concatenated or padded.

    Args:
      residuals: whether attended rows and lse are returned of all positions.
    """
    b, T, x = launch.tiles.tile, x.shape[0], x[None]
    slots = T if residuals else min(b, T)
    buffers = Buffers.of(launch, x, w, attended_slots=slots)

    def step(done, tile, count, carry):
        buffers, keys, values = carry
        done = jnp.asarray(done, jnp.int32).reshape(1)
        buffers, last = run_positions(
            folded, launch, x, tile, w, keys, values, start, done, count, buffers
        )
        slots = (keys, values)
        for at, pairs in ((done, buffers.pairs_so_far()), (done + count - 1, last)):
            if training:
                slots = put_in_order(slots, pairs, at[0], T)
            else:
                slots = put_in_slots(slots, pairs, start, at, at >= 0, T)
        return buffers, *slots

    def whole_tile(j, carry):
        tile = jax.lax.dynamic_slice_in_dim(x, j * b, b, axis=1)
        return step(j * b, tile, b, carry)

    carry = (buffers, keys, values)
    full = T // b
    if full:
        carry = jax.lax.fori_loop(0, full, whole_tile, carry)
    if count := T - full * b:
        rest = jnp.pad(x[:, full * b :], ((0, 0), (0, b - count), *NO_PAD))
        carry = step(full * b, rest, count, carry)
    buffers, keys, values = carry
    attended, lse, *_ = buffers.state
    return TritonOutputs(buffers.z, attended, lse, keys, values)


def run_tile(
    folded: Folded | None, launch: Launch, x, w, keys, values, start, done, count
) -> Tile:
    """Runs `count` of a tile's positions; `done` of each layer came before."""
    buffers = Buffers.of(launch, x, w, attended_slots=x.shape[1])
    tile = (folded, launch, x, x, w, keys, values, start, done, count)
    buffers, last = run_positions(*tile, buffers, first=0)
    keys, values = (
        jax.lax.dynamic_update_index_in_dim(pairs, part[:, 0], count - 1, 1)
        for pairs, part in zip(buffers.pairs_so_far(), last, strict=True)
    )
    return Tile(buffers.z, buffers.state._replace(keys=keys, values=values))


def run_positions(
    folded: Folded | None,
    launch: Launch,
    x: Float[Array, "L slots B D"],
    tile: Float[Array, "L b B D"],
    w: PreparedWeights,
    keys: Float[Array, "L B S KE"],
    values: Float[Array, "L B S KE"],
    start: Int[Array, " B"],
    done: Int[Array, " L"],
    count: int,
    buffers: Buffers,
    *,
    first: int | None = None,
) -> tuple[Buffers, tuple[Float[Array, "L 1 B KE"], Float[Array, "L 1 B KE"]]]:
    """Runs `count` positions of a tile; returns the last one's pair and the buffers.

    Args:
      x: rows of all positions, or of the tile.
      tile: the tile's.
      start: how many positions each row had seen before the call.
      done: how many of the call's each layer has run before.
      first: first position of the tile in x and in the buffers; None: for one layer,
        which is done.
    """
    spec, (b, sub) = launch.spec, (launch.tiles.tile, launch.tiles.sub_tile)
    L, B, D = tile.shape[0], *tile.shape[2:]
    q, own_k, own_v = queries_and_pairs(tile, w, spec)
    before = (start + done[:, None]).astype(jnp.int32)
    running = attend_prefix(launch, q, own_k, own_v, keys, values, before)
    # XLA would compute constants again at every position.
    vectors = jax.lax.optimization_barrier(Vectors.of(w, spec, D))
    apart = folded is None
    if folded is None:
        folded = Folded(w.w_in, vectors.b_in, w.w_kv, vectors.b_kv)
    F, KE = w.w_down.shape[1], own_k.shape[-1]
    columns = pair_columns(launch, L, B, 2 * KE)
    out_split, down_split = _splits(launch, w, B)
    origin = done[0] if first is None else jnp.int32(first)

    def position(sub_first, i, carry):
        running, old = carry
        t = Position(sub_first, i.astype(jnp.int32).reshape(1))
        state = attend(
            launch,
            t,
            q,
            running,
            old.pairs,
            old.statistics,
            columns,
            vectors.k_norm,
            old.state,
        )
        y, y_row, y_statistics, out_finished, _ = add_product(
            launch,
            t,
            state.attended,
            w.w_out,
            vectors.b_out,
            x,
            old.y,
            old.finished[0],
            out_split,
        )
        hidden = hidden_product(
            launch,
            t,
            y if apart else y_row,
            y_statistics,
            vectors.mlp_norm,
            folded.w_in,
            folded.b_in,
            F,
            columns_read=out_split.columns,
            folded=not apart,
        )
        z, z_row, z_statistics, down_finished, _ = add_product(
            launch,
            t,
            hidden,
            w.w_down,
            vectors.b_down,
            y,
            old.z,
            old.finished[1],
            down_split,
        )
        pairs, statistics = pair_product(
            launch,
            t,
            z if apart else z_row,
            z_statistics,
            vectors.attention_norm,
            folded.w_kv,
            folded.b_kv,
            columns_read=down_split.columns,
            folded=not apart,
        )
        return running, Buffers(
            z, state, y, pairs, statistics, (out_finished, down_finished)
        )

    def sub_tile(behind, size, carry):
        running, buffers = carry
        sub_first = (origin + jnp.asarray(behind, jnp.int32)).reshape(1)
        if sub < b:  # The first has nothing to read: all are one loop's body.
            pairs = (buffers.state.keys, buffers.state.values)
            running = attend_earlier(launch, sub_first, q, *pairs, running)
        # With a number of turns that is known a GPU gets them as one graph.
        return jax.lax.fori_loop(
            0, size, partial(position, sub_first), (running, buffers)
        )

    carry, full = (running, buffers), count // sub
    if full > 1:
        carry = jax.lax.fori_loop(
            0, full, lambda s, carry: sub_tile(s * sub, sub, carry), carry
        )
    elif full:
        carry = sub_tile(0, sub, carry)
    if count > full * sub:
        carry = sub_tile(full * sub, count - full * sub, carry)
    _, buffers = carry
    # The step that would have finished the last position's pair never came.
    last_k = norm_and_rotate(buffers.pairs[..., :KE], w.k_norm, None, spec)
    last = (last_k.reshape(L, B, KE), buffers.pairs[..., KE:])
    last_k, last_v = (part.astype(spec.dtype)[:, None] for part in last)
    return buffers, (last_k, last_v)


def _unskew(rows: Array, full: int) -> Array:
    """Turns [steps, L, b, ...] of the skewed loop into [L, full b, ...]."""
    L, b = rows.shape[1:3]
    layers = [
        rows[l : l + full, l].reshape(full * b, *rows.shape[3:]) for l in range(L)
    ]
    return jnp.stack(layers)
