"""The stack: a scan over loops around the scan over the shared block's layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.mesh import UncutStack
from recurjax.layers.position import learned_positions
from recurjax.layers.stack import (
    CacheRows,
    PatternCache,
    advanced,
    loops_a_turn,
    make_blocks,
    scan_layers,
    scan_pattern,
)
from recurjax.types import Array, Cache, Tokens
from recurjax.variants.relaxed_recursive_transformer.adapters import BlockAdapters
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.layer_runs import (
    keeps,
    one_by_one,
    reads,
    runs,
)
from recurjax.variants.relaxed_recursive_transformer.loop_by_loop import LoopByLoop
from recurjax.variants.relaxed_recursive_transformer.sharing import shared_layers
from recurjax.variants.relaxed_recursive_transformer.ticks import Ticks
from recurjax.variants.relaxed_recursive_transformer.uses import (
    Uses,
    joined,
    own_leaves,
    shared_leaves,
    with_vectors_by_loop,
)
from recurjax.variants.transformer.block import TransformerBlock
from recurjax.variants.transformer.stack import empty_cache


class RelaxedRecursiveTransformerStack(LoopByLoop, Ticks, CacheRows, UncutStack):
    """A block of K layers, run `loops` times; `blocks` as a Transformer's of K layers.

    Untied norms and biases have the loops as one more leading axis. `adapters[p]` has
    the axes [loops, K / P] for place p of a P-pattern: entry [b, r] belongs to the
    block's layer r P + p when it is run for the b-th time, see `depths_of`.
    """

    def __init__(self, config: RelaxedRecursiveTransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        base, loops = config.transformer, config.loops

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> TransformerBlock:
            window = base.windows[place]
            return TransformerBlock(base, window=window, layer=layer, rngs=rngs)

        blocks = make_blocks(
            block, layers=config.block_layers, pattern=len(base.windows), rngs=rngs
        )
        if not config.tie_norms:
            blocks = [with_vectors_by_loop(block, loops) for block in blocks]
        self.blocks = nnx.List(blocks)
        self.position = learned_positions(
            base.attention.position, base.width, base.init, rngs=rngs
        )
        # One adapter a depth and none shared: each is drawn from a key of its own.
        adapters = []
        if config.rank:

            def adapter(key: Array) -> BlockAdapters:
                return BlockAdapters(config, rngs=nnx.Rngs(params=key))

            shape = (loops, self._repeats)
            for _ in base.windows:
                keys = jax.random.split(rngs.params(), shape)
                adapters.append(jax.vmap(jax.vmap(adapter))(keys))
        self.adapters = nnx.List(adapters) if adapters else None

    @property
    def _repeats(self) -> int:
        # K / P: a place of the pattern is one module with so many layers stacked in it.
        return self.config.block_layers // len(self.config.transformer.windows)

    def init_cache(self, batch: int, length: int, dtype) -> PatternCache:
        """Makes the cache for `length` tokens a row; a window's is a ring buffer.

        It has an entry for each depth, or for each layer of the block where deeper
        loops read what loop 1 wrote.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: of keys and values.

        Raises:
          ValueError: learned positions end before `length`.
        """
        loops = self.config.loops if self.config.loop_cache == "own" else 1
        entries = loops * self._repeats
        return empty_cache(self.config.transformer, entries, batch, length, dtype)

    def __call__(
        self, x: Float[Array, "B T D"], cache: PatternCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], PatternCache]:
        x, _, cache = self._run(x, cache, tokens, states=False)
        return x, cache

    def states(
        self, x: Float[Array, "B T D"], cache: PatternCache, tokens: Tokens
    ) -> tuple[Float[Array, "R B T D"], PatternCache]:
        """Runs all loops and returns the stream after each: what exits read.

        Raises:
          ValueError: the sharing is not "cycle": only there does a loop end somewhere.
        """
        self.check_cycle("states")
        _, after, cache = self._run(x, cache, tokens, states=True)
        return after, cache

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first depth, and what leaves each: `one_by_one`."""
        config, cache = self.config, self.init_cache(x.shape[0], 0, x.dtype)
        shared, (own, _) = shared_leaves(self.blocks, config), self.turns()
        uses = [jax.tree.map(lambda w, b=b: w[b], own) for b in range(config.loops)]
        parts = [self.parts(shared, use) for use in uses]
        order = shared_layers(config.layers, config.loops, config.sharing)
        on_first, x = config.loop_cache == "first", self.enter(x, cache)
        return one_by_one(x, parts, order, cache, tokens, on_first=on_first)

    def _run(
        self, x: Array, cache: PatternCache, tokens: Tokens, *, states: bool
    ) -> tuple[Array, Any, PatternCache]:
        """Runs all depths.

        Returns:
          The last state, those after each loop (None unless wanted), and the cache.
        """
        config, x, after = self.config, self.enter(x, cache), None
        # Sharing in sequence runs one layer several times before the next: other
        # nesting.
        in_sequence = config.sharing == "sequence" and config.loops > 1
        if in_sequence:
            x, groups = self._in_sequence(x, cache, tokens)
        elif config.loop_cache == "own" or config.loops == 1:
            x, groups, after = self._in_loops(x, cache, tokens, states=states)
        else:
            x, groups, after = self._on_first_loop(x, cache, tokens, states=states)
        return x, after, advanced(cache, groups, x.shape[1], tokens)

    def _in_loops(
        self, x: Array, cache: PatternCache, tokens: Tokens, *, states: bool
    ) -> tuple[Array, tuple[Cache, ...], Any]:
        """Runs loop after loop, each depth on keys and values of its own.

        The block is closed over and not taken apart by the scan over loops: so its
        gradient is summed into one copy. Taking layer l mod K of it in one scan over
        depths would make 2.5 times the gradients' memory.
        """
        shared, run = shared_leaves(self.blocks, self.config), runs(tokens)

        def loop(carry, turn, *, reverse: bool = False):
            x, groups = carry
            own, entries = turn
            parts = self.parts(shared, own)
            x, groups, _ = self.layers(
                run, x, groups, parts, entries, cache, reverse=reverse
            )
            # Kept only when asked for: training would hold every loop's stream for
            # nothing.
            return (x, groups), x if states else None

        forward, last = self._turned_apart(self.turns())
        carry, after = (x, cache.groups), None
        if forward is not None:
            carry, after = _over_loops(loop, carry, forward, cache)
        if last is not None:
            carry, _ = loop(carry, last, reverse=True)
        x, groups = carry
        return x, groups, after

    def _on_first_loop(
        self, x: Array, cache: PatternCache, tokens: Tokens, *, states: bool
    ) -> tuple[Array, tuple[Cache, ...], Any]:
        """Runs loop 1, then the deeper ones on the keys and values that it made."""
        shared, (own, entries) = shared_leaves(self.blocks, self.config), self.turns()
        first = jax.tree.map(lambda leaf: leaf[0], own)
        parts, entries = self.parts(shared, first), entries[0]
        keep = keeps(tokens)
        x, written, kept = self.layers(keep, x, cache.groups, parts, entries, cache)
        read, after_first = reads(tokens, cache), x

        def loop(x, turn, *, reverse: bool = False):
            parts = self.parts(shared, turn[0], kept)
            # The cache that comes out is dropped: a deeper loop writes nothing.
            x, _, _ = self.layers(
                read, x, written, parts, entries, cache, reverse=reverse
            )
            return x, x if states else None

        forward, last = self._turned_apart(self.turns(start=1))
        after = None
        if forward is not None:
            x, after = _over_loops(loop, x, forward, cache)
        if last is not None:
            # Its state after the loop is not asked for: exits need sharing "cycle".
            x, _ = loop(x, last, reverse=True)
        if after is not None:
            # Loop 1 ran outside the scan over loops: its state is put in front.
            after = jnp.concatenate([after_first[None], after])
        return x, written, after

    def _in_sequence(
        self, x: Array, cache: PatternCache, tokens: Tokens
    ) -> tuple[Array, tuple[Cache, ...]]:
        """Runs each layer of the block `loops` times before the next one."""
        # One layer's uses follow each other: on its own keys, or on those of its first
        # use.
        act, read = runs(tokens), reads(tokens, cache)
        on_first = self.config.loop_cache == "first" and self.config.loops > 1
        if on_first:
            act = keeps(tokens)

        def repeat(carry, turn):
            x, groups = carry
            shared, (own, entries) = turn  # of one repeat; own by use, [loops, ...]
            written = []
            for here, group in enumerate(groups):

                def use(act, kept, _, own, x, group, here=here):
                    block = joined(
                        self.blocks[here], self.config, shared[here], own.vectors
                    )
                    return act(here, (block, own.adapters, kept), x, group)

                uses = (own[here], entries)
                # The first use makes keys and values, so it cannot share the others'
                # scan.
                if on_first:
                    x, group, made = self._uses(
                        partial(use, act, None), x, group, _part(uses, 0, 1), cache
                    )
                    kept = jax.tree.map(lambda leaf: leaf[0], made)
                    rest = _part(uses, 1, None)
                    x, group, _ = self._uses(
                        partial(use, read, kept), x, group, rest, cache
                    )
                else:
                    x, group, _ = self._uses(
                        partial(use, act, None), x, group, uses, cache
                    )
                written.append(group)
            return (x, tuple(written)), None

        # By repeat of the pattern first, as the outer scan here goes over layers.
        by_repeat = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), self.turns())
        (x, groups), _ = _scan(
            repeat,
            (x, cache.groups),
            (shared_leaves(self.blocks, self.config), by_repeat),
            cache,
        )
        return x, groups

    def _uses(
        self, act: Callable, x: Array, group: Cache, uses: Any, cache: PatternCache
    ) -> tuple[Array, Cache, Any]:
        """Runs one layer once for each of its uses given."""
        own, entries = uses
        x, (group,), (made,) = self.layers(act, x, (group,), (own,), entries, cache)
        return x, group, made

    def layers(
        self,
        act: Callable,
        x: Array,
        groups: tuple[Cache, ...],
        parts: tuple[Any, ...],
        entries: Array,
        cache: PatternCache,
        *,
        reverse: bool = False,
    ) -> tuple[Array, tuple[Cache, ...], tuple[Any, ...]]:
        base = self.config.transformer
        return scan_pattern(
            act,
            x,
            groups,
            parts,
            entries,
            position=cache.position,
            remat=base.remat,
            unroll=base.unroll,
            cached=not cache.training,
            reverse=reverse,
        )

    def parts(self, shared, own, kept=None) -> tuple[Any, ...]:
        """Returns what `layers` scans over: block, adapters, kept keys by place."""
        kept = [None] * len(own) if kept is None else kept
        return tuple(
            (
                joined(self.blocks[place], self.config, matrices, uses.vectors),
                uses.adapters,
                pair,
            )
            for place, (matrices, uses, pair) in enumerate(
                zip(shared, own, kept, strict=True)
            )
        )

    def turns(self, start: int = 0) -> tuple[tuple[Uses, ...], Array]:
        """Returns what each use owns and its entry of the cache: [loops, K / P, ...].

        Args:
          start: the first loop returned.
        """
        own = own_leaves(self.blocks, self.adapters, self.config)
        loops, repeats = self.config.loops, self._repeats
        # Loop b's r-th layer of a place has entry b K / P + r of that place's cache;
        # where all loops read loop 1's, only r counts.
        entries = jnp.arange(loops * repeats, dtype=jnp.int32).reshape(loops, repeats)
        if self.config.loop_cache == "first":
            entries = entries % repeats
        return _part((own, entries), start, None)

    def _turned_apart(self, turns: Any) -> tuple[Any, Any]:
        """Returns the loops that run forwards, and the one that runs backwards, if any.

        Either is None where there is none such.
        """
        if self.config.sharing != "cycle_rev" or self.config.loops == 1:
            return turns, None
        # The last loop is turned: it is run by itself, with its layers in reverse.
        last = jax.tree.map(lambda leaf: leaf[-1], turns)
        count = turns[1].shape[0] - 1
        return (_part(turns, 0, count) if count else None), last


def _over_loops(body: Callable, carry: Any, turns: Any, cache: PatternCache):
    """Scans over loops; a single one is run as it is, and is the Transformer's run."""
    if turns[1].shape[0] > 1:
        return _scan(body, carry, turns, cache)
    carry, out = body(carry, jax.tree.map(lambda leaf: leaf[0], turns))
    return carry, jax.tree.map(lambda leaf: leaf[None], out)


def _scan(body: Callable, carry: Any, turns: Any, cache: PatternCache):
    """Scans without rematerialization: that is a matter of the layers inside."""
    cached = not cache.training
    x = carry if isinstance(carry, jax.Array) else carry[0]
    return scan_layers(
        body,
        carry,
        turns,
        remat="nothing",
        unroll=loops_a_turn(x, 1, turns[-1][-1].shape[0], cached=cached),
        cached=cached,
    )


def _part(turns: Any, start: int, stop: int | None) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], turns)
