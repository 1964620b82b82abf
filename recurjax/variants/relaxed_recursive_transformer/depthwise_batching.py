"""An engine's tick: one pass through the block for rows at different loops.

A row of the batch is a slot of an engine, and its T tokens are lanes, each at its own
loop and position. No matrix is gathered by row: the additions of all loops are one
product, of which each lane selects its columns. The cache holds keys and values loop by
loop, and a lane reads its loop's part: one contiguous piece, or, on TPU, all of them
under a mask.

Mixers of a `RatConfig` keep the stack's own cache: a row's part of it, that of its
loop, is moved out, run as in any decode step, and moved back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels import target
from recurjax.layers.attention import (
    KeysValues,
    attend,
    dropped_slots,
    slot_positions,
    slots_for,
    visible_by_position,
)
from recurjax.layers.position import with_positions
from recurjax.layers.stack import CacheRows, PatternCache, scan_layers
from recurjax.types import Array, LoopPositions, Tokens
from recurjax.variants.rat import RatConfig, RecurrentLayerConfig
from recurjax.variants.relaxed_recursive_transformer.block import (
    LoopedBlock,
    LoopWeights,
    join,
    shared_weights,
    weights_by_layer,
)
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer.block import TransformerBlock


class TickCache(NamedTuple):
    """Keys and values of all loops, for each place in the pattern of layers.

    The N parts after the rows are the loops, or one where deeper loops read what loop
    1 wrote. Positions are the caller's: its lanes stand at several.
    """

    keys: tuple[Float[Array, "L B N S K E"], ...]
    values: tuple[Float[Array, "L B N S K E"], ...]


class DepthwiseBatching(CacheRows):
    """A looped stack's methods for an engine that batches over depth."""

    config: RelaxedRecursiveTransformerConfig
    blocks: Any
    adapters: Any
    position: Any
    _repeats: int

    def tick_weights(self) -> tuple[LoopWeights, ...]:
        """Returns what the loops own, laid out for `tick`: build them once."""
        return weights_by_layer(self.blocks, self.adapters, self.config)

    def init_ticks(
        self, batch: int, length: int, dtype: Any, *, ahead: int = 0
    ) -> TickCache | PatternCache:
        """Creates an empty cache for `length` tokens per row.

        Args:
          ahead: how many later tokens may be written before a token has finished
            reading; windows' rings are longer by this number.
        """
        config = self.config.transformer
        if isinstance(config, RatConfig):
            return self.init_cache(batch, length, dtype)
        a, parts = config.attention, self._cache_parts
        keys = []
        for kind in config.pattern:
            slots = slots_for(length, kind.window, ahead=ahead)
            shape = (self._repeats, batch, parts, slots, a.key_heads, a.head_width)
            keys.append(jnp.zeros(shape, dtype))
        return TickCache(keys=tuple(keys), values=tuple(map(jnp.zeros_like, keys)))

    def insert_ticks(
        self,
        cache: TickCache | PatternCache,
        row: Int[Array, ""] | int,
        other: PatternCache,
    ) -> TickCache | PatternCache:
        """Copies a prefilled cache of one row into a row of the tick cache."""
        if isinstance(cache, PatternCache):
            return self.insert(cache, row, other)
        parts = self._cache_parts

        def put(leaf: Array, new: Array) -> Array:
            # From loop after loop, [N L, 1, S, K, E], to all loops of a layer.
            new = new.reshape(parts, self._repeats, *new.shape[1:])
            new = jnp.moveaxis(new, 0, 2)
            slots, prefilled = leaf.shape[3], new.shape[3]
            if slots != prefilled:
                # A longer ring: every token goes where the longer one looks for it.
                at = slot_positions(slots, other.position)[0] % prefilled
                new = jnp.take(new, at, axis=3)
            new = new.astype(leaf.dtype)
            return jax.lax.dynamic_update_slice_in_dim(leaf, new, row, 1)

        def all_places(leaves: tuple[Array, ...], name: str) -> tuple[Array, ...]:
            groups = [getattr(group, name) for group in other.groups]
            return tuple(map(put, leaves, groups))

        return TickCache(
            keys=all_places(cache.keys, "keys"),
            values=all_places(cache.values, "values"),
        )

    def enter_ticks(
        self, x: Float[Array, "B 1 D"], position: Int[Array, " B"]
    ) -> Float[Array, "B 1 D"]:
        """Returns what loop 1 reads: embeddings, with learned positions if any."""
        return with_positions(x, self.position, position, training=False)

    def tick(
        self,
        x: Float[Array, "B T D"],
        lanes: LoopPositions,
        cache: TickCache | PatternCache,
        weights: tuple[LoopWeights, ...],
        *,
        loop: int | None = None,
        ran: Int[Array, "B P"] | None = None,
    ) -> tuple[Float[Array, "B T D"], TickCache | PatternCache]:
        """Runs every lane through its loop.

        Args:
          x: from `enter_ticks` at loop 0, else from the lane's loop before.
          lanes: one for each row; or as many as there are loops, lane l at loop l; or,
            with `loop`, any number of them. Of mixers with states, one for each row.
          weights: `tick_weights()`.
          loop: the loop of all lanes; None: they may be at different ones.
          ran: how many loops the token at each position has run: where it was fewer
            than a lane's, it wrote nothing and is not seen. For one lane a row. None:
            all tokens are seen.
        """
        if isinstance(cache, PatternCache):
            assert lanes.loop.shape[1] == 1 and ran is None, "see refuses_ticks"
            run = _on_states(lanes, self._repeats, _advance)
            x, groups = self._layers_of(run, x, lanes, cache.groups, weights)
            return x, cache._replace(groups=groups)
        run = _on_keys(lanes, loop, ran)
        pairs = tuple(zip(cache.keys, cache.values, strict=True))
        x, pairs = self._layers_of(run, x, lanes, pairs, weights)
        keys, values = zip(*pairs, strict=True)
        return x, TickCache(keys=keys, values=values)

    def fill_ticks(
        self,
        x: Float[Array, "B 1 D"],
        leaving: LoopPositions,
        cache: TickCache | PatternCache,
        weights: tuple[LoopWeights, ...],
    ) -> TickCache | PatternCache:
        """Writes the keys and values that tokens which leave lack: see `propagate`.

        All deeper layers' in one product and one scatter. States are advanced loop by
        loop.

        Args:
          x: after the last loop run, before the final norm.
          leaving: one lane a row; its loop is the last one run, and it is live where
            its token leaves.
        """
        loops = self.config.loops
        if isinstance(cache, PatternCache):
            groups = cache.groups
            for loop in range(1, loops):
                lanes = leaving._replace(
                    loop=jnp.full_like(leaving.loop, loop),
                    live=leaving.live & (loop > leaving.loop),
                )
                run = _on_states(lanes, self._repeats, _write_state)
                _, groups = self._layers_of(run, x, lanes, groups, weights)
            return cache._replace(groups=groups)
        if self._cache_parts == 1:  # nothing is missing where all loops read loop 1's
            return cache
        # Every deeper loop is a lane of its own that begins with the same state; those
        # not deeper than the token's are dropped when they are written.
        B, deeper = x.shape[0], jnp.arange(1, loops)
        shape = (B, loops - 1)
        live = leaving.live & (deeper > leaving.loop)
        lanes = LoopPositions(
            loop=jnp.broadcast_to(deeper, shape),
            position=jnp.broadcast_to(leaving.position, shape),
            live=live,
        )
        x = jnp.broadcast_to(x, (*shape, x.shape[-1]))
        shared = shared_weights(self.blocks, self.config)
        keys, values = [], []
        for place, (matrices, place_weights) in enumerate(
            zip(shared, weights, strict=True)
        ):

            def project(matrices, own, place=place) -> KeysValues:
                block = self._block(place, matrices, own, lanes)
                assert isinstance(block, TransformerBlock)
                return block.keys_and_values(x, lanes.position)

            new = jax.vmap(project)(matrices, _of_lanes(place_weights, lanes))
            entries = jnp.arange(self._repeats)[:, None, None]
            keys.append(_write(cache.keys[place], entries, lanes, new.keys))
            values.append(_write(cache.values[place], entries, lanes, new.values))
        return TickCache(keys=tuple(keys), values=tuple(values))

    def refuses_ticks(self, *, rollback: bool) -> str | None:
        """Returns why rows cannot run at different loops at once, or None.

        Args:
          rollback: tokens that were read are taken back, as wrong drafts are.
        """
        config = self.config
        if not isinstance(config.transformer, RatConfig):
            return None
        if rollback:
            return (
                "the states of a RatConfig's mixers cannot forget a token that they "
                "have read: leave it out"
            )
        kinds = map(type, config.transformer.pattern)
        if (config.rank or not config.tie_norms) and RecurrentLayerConfig in kinds:
            return (
                "rows at different loops need weights of their own, and the Recurrent "
                "Transformer's layer has one matrix for all rows: use rank 0 and "
                "tie_norms, or leave it out"
            )
        return None

    def _layers_of(
        self,
        run: Callable,
        x: Float[Array, "B T D"],
        lanes: LoopPositions,
        groups: tuple[Any, ...],
        weights: tuple[LoopWeights, ...],
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
        """Runs the lanes through the block's layers.

        Args:
          run: `run(block, x, group, entry) -> (x, group)` for one layer.
          groups: what each place keeps.
        """

        def layer(carry, turn):
            x, groups = carry
            parts, entry = turn
            groups = list(groups)
            for place, (matrices, own) in enumerate(parts):
                block = self._block(place, matrices, own, lanes)
                x, groups[place] = run(block, x, groups[place], entry)
            return (x, tuple(groups)), None

        shared = shared_weights(self.blocks, self.config)
        parts = tuple(
            (matrices, _of_lanes(own, lanes))
            for matrices, own in zip(shared, weights, strict=True)
        )
        (x, groups), _ = scan_layers(
            layer,
            (x, groups),
            (parts, jnp.arange(self._repeats, dtype=jnp.int32)),
            remat="nothing",
            unroll=min(self.config.transformer.unroll, self._repeats),
            cached=True,
        )
        return x, groups

    def _block(
        self,
        place: int,
        matrices: tuple[Array, ...],
        own: LoopWeights,
        lanes: LoopPositions,
    ) -> LoopedBlock:
        """Returns a layer whose adapters are, at each lane, its loop's."""
        loops = self.config.loops

        def active(reduce: Array) -> Array:
            columns = jnp.arange(reduce.shape[-1]) // (reduce.shape[-1] // loops)
            return columns == lanes.loop[..., None]

        return join(self.blocks[place], self.config, matrices, own, active)

    @property
    def _cache_parts(self) -> int:
        return self.config.loops if self.config.loop_cache == "own" else 1


def _on_keys(
    lanes: LoopPositions, loop: int | None, ran: Int[Array, "B P"] | None
) -> Callable:
    """Runs a layer on the keys and values of each lane's loop: see `tick`."""

    def run(block: TransformerBlock, x: Array, group: tuple[Array, Array], entry):
        keys, values = group

        def look(q, new: KeysValues, **options) -> Array:
            nonlocal keys, values
            # Written first: a token sees itself.
            keys = _write(keys, entry, lanes, new.keys)
            values = _write(values, entry, lanes, new.values)
            k, v = (_seen(part, entry, lanes, loop) for part in (keys, values))
            return _read(q, k, v, lanes, ran, **options)

        x = block.through(x, lanes.position, look)
        return x, (keys, values)

    return run


def _on_states(lanes: LoopPositions, repeats: int, act: Callable) -> Callable:
    """Runs a layer on each row's own entry of its cache, by loop and then by repeat.

    Args:
      lanes: one a row.
      act: `act(block, x, cache, tokens) -> (x, cache)`.
    """
    rows = jnp.arange(lanes.loop.shape[0])
    # A lane without a token is a row of no tokens, which keeps its state.
    live = lanes.live[:, 0].astype(jnp.int32)
    tokens = Tokens(jnp.zeros_like(lanes.loop), lengths=live)

    def run(block: LoopedBlock, x: Array, group: Any, entry: Array):
        at = (lanes.loop[:, 0] * repeats + entry, rows)
        # Every array of a cache but these two has layers and rows in front.
        stacked = group._replace(position=None, layer=None)
        own = jax.tree.map(lambda leaf: leaf[at][None], stacked)
        own = own._replace(position=lanes.position[:, 0], layer=jnp.int32(0))
        x, own = act(block, x, own, tokens)
        own = own._replace(position=None, layer=None)
        written = jax.tree.map(
            lambda leaf, new: leaf.at[at].set(new[0], unique_indices=True),
            *(stacked, own),
        )
        return x, written._replace(position=group.position, layer=group.layer)

    return run


def _advance(block: LoopedBlock, x: Array, cache: Any, tokens: Tokens):
    return block(x, cache, tokens)


def _write_state(block: LoopedBlock, x: Array, cache: Any, tokens: Tokens):
    return x, block.write(x, cache, tokens)


def _of_lanes(weights: LoopWeights, lanes: LoopPositions) -> LoopWeights:
    """Returns the weights with each lane's norms and biases, where they are untied."""
    # Vectors, which are small: the matrices are never gathered by row.
    vectors = tuple(leaf[:, lanes.loop] for leaf in weights.vectors)
    return weights._replace(vectors=vectors)


def _write(
    stacked: Float[Array, "L B N S K E"], entry: Array, lanes: LoopPositions, new: Array
) -> Array:
    """Writes each live lane's keys or values into its loop's part.

    Args:
      entry: a layer's number; or all, [L, 1, 1], with the layers in front of `new`.
    """
    B, slots = stacked.shape[1], stacked.shape[3]
    # Out of range is dropped: the slot of a lane without a token, and, where there is
    # only loop 1's part, deeper loops.
    nowhere = dropped_slots(slots, lanes.live.shape[1])
    slot = jnp.where(lanes.live, lanes.position % slots, nowhere)
    loop, rows = lanes.loop, jnp.arange(B)[:, None]
    if new.shape[-4] * new.shape[-3] == 1:
        # As in `key_value_cache.write`: a single token would not be a scatter for XLA,
        # and on CPU all of the cache would be copied. The second one is dropped.
        slot = jnp.pad(slot, ((0, 0), (0, 1)), constant_values=slots + 1)
        loop = jnp.concatenate([loop, loop], axis=1)
        new = jnp.concatenate([new, new], axis=-3)
    at = stacked.at[entry, rows, loop, slot]
    return at.set(new.astype(stacked.dtype), mode="drop", unique_indices=True)


def _seen(
    stacked: Float[Array, "L B N S K E"],
    entry: Array,
    lanes: LoopPositions,
    loop: int | None,
) -> Float[Array, "B M S K E"]:
    """Returns a layer's parts that lanes read: the one loop of all lanes, or all N."""
    L, B, N, S, *heads = stacked.shape
    if loop is not None and N > 1:
        at = [jnp.asarray(n, jnp.int32) for n in (entry, 0, loop, 0, 0, 0)]
        return jax.lax.dynamic_slice(stacked, at, (1, B, 1, S, *heads))[0]
    # All parts are read under a mask: N times the attention, but no slice per row.
    if lanes.loop.shape[1] > 1 or N == 1 or target.slices_rows_slowly():
        # The parts are joined before the layer is taken: joined after it, XLA for TPU
        # writes the layer down first, three times the bytes.
        return stacked.reshape(L, B, N * S, *heads)[entry].reshape(B, N, S, *heads)

    # Move one contiguous piece per row: the other loops' parts are not touched.
    def row_at(row: Array, loop: Array) -> Array:
        # All of one dtype, as `vmap` wants them where 64-bit types are enabled.
        at = [jnp.asarray(n, jnp.int32) for n in (entry, row, loop, 0, 0, 0)]
        return jax.lax.dynamic_slice(stacked, at, (1, 1, 1, *stacked.shape[3:]))[0, 0]

    return jax.vmap(row_at)(jnp.arange(stacked.shape[1]), lanes.loop[:, 0])


def _read(
    q: Float[Array, "B T H E"],
    keys: Float[Array, "B N S K E"],
    values: Float[Array, "B N S K E"],
    lanes: LoopPositions,
    ran: Int[Array, "B P"] | None,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    bias: Any,
) -> Float[Array, "B T H E"]:
    """Attends to what is written of each lane's loop, up to its own position."""
    B, N, S = keys.shape[:3]
    T, position = q.shape[1], lanes.position
    folded = T > 1 and N > 1
    if folded:
        # Lane l is at loop l and reads part l: lanes are rows of a larger batch, which
        # needs no copies.
        q = q.reshape(B * T, 1, *q.shape[2:])
        position = position.reshape(B * T, 1)
        keys, values = (x.reshape(B * T, 1, *x.shape[2:]) for x in (keys, values))
    # With several lanes on one part, the newest token determines the slots' positions.
    # All lanes see the same positions, because rings are longer by the number of lanes.
    newest = position[:, 0]
    if T > 1 and not folded:
        newest = jnp.max(jnp.where(lanes.live, position, 0), axis=1)
    at = slot_positions(S, newest + 1)
    parts = keys.shape[1]
    everywhere = jnp.tile(at, (1, parts))
    mask = visible_by_position(position, everywhere, window=window)
    if parts > 1:
        part = jnp.arange(parts * S) // S
        mask &= (part == lanes.loop)[:, None, None]
    if ran is not None:
        # An empty slot has a negative position and is unseen whatever is read for it.
        loops = jnp.take_along_axis(ran, jnp.clip(at, 0, ran.shape[1] - 1), axis=1)
        unwritten = (loops <= lanes.loop) & (at != position)
        mask &= ~jnp.tile(unwritten, (1, parts))[:, None, None]
    o = attend(
        q,
        keys.reshape(*keys.shape[:1], parts * S, *keys.shape[3:]).astype(q.dtype),
        values.reshape(*keys.shape[:1], parts * S, *keys.shape[3:]).astype(q.dtype),
        scale=scale,
        causal=False,
        mask=mask,
        bias=None if bias is None else bias(position, everywhere),
        soft_cap=soft_cap,
    )
    return o.reshape(B, T, *o.shape[2:])
