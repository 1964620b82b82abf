"""The stack: a scan over loops around the scan over the shared block's layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from recurjax.layers.attention import KeysValues, KeyValueCache, slot_positions
from recurjax.layers.mesh import UncutStack
from recurjax.layers.position import learned_positions, with_positions
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
from recurjax.variants.relaxed_recursive_transformer.block import (
    BlockAdapters,
    Uses,
    holding,
    joined,
    keeps,
    one_by_one,
    own_leaves,
    reads,
    runs,
    shared_layers,
    shared_leaves,
    with_vectors_by_loop,
    writes,
)
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.depthwise_batching import Ticks
from recurjax.variants.transformer.block import TransformerBlock
from recurjax.variants.transformer.stack import empty_cache


class LoopByLoop:
    """What a looped stack offers beside its call; the stack itself has the rest."""

    config: RelaxedRecursiveTransformerConfig
    blocks: Any
    position: Any
    init_cache: Callable[..., PatternCache]
    turns: Callable[..., Any]
    parts: Callable[..., Any]
    layers: Callable[..., Any]

    def enter(
        self, x: Float[Array, "B T D"], cache: PatternCache
    ) -> Float[Array, "B T D"]:
        """Returns what loop 1 reads: embeddings, with learned positions if any."""
        return with_positions(x, self.position, cache.position, training=cache.training)

    def loop(
        self,
        x: Float[Array, "B T D"],
        b: int | Int[Array, ""],
        cache: PatternCache,
        tokens: Tokens,
        *,
        ran: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B T D"], PatternCache]:
        """Runs one loop, for a caller that decides after each whether to go on.

        The rows stand until `advance` moves them on, when a token has left.

        Args:
          x: from `enter`, or from the loop before.
          b: which loop, from 0.
          ran: how many loops the token at each position has run: where it was fewer
            than this one, it wrote nothing and is not seen. None: all tokens are seen.

        Raises:
          ValueError: the sharing is not "cycle"; the cache is the training cache; or
            loop_cache "first" with another loop than a plain number, or with several
            tokens: deeper loops then find what loop 1 made of one token in the cache,
            and only there.
        """
        self.check_cycle("loop")
        first = self.config.loop_cache == "first"
        if cache.training:
            raise ValueError("loop: wants a real cache")
        if first and not (isinstance(b, int) and x.shape[1] == 1):
            raise ValueError(
                "loop: with loop_cache 'first' wants one token, and b as an int"
            )
        own, entries = jax.tree.map(lambda leaf: leaf[b], self.turns())
        kept, act = None, runs(tokens)
        if first and b:
            act = reads(tokens, cache)
            # One token is read from its slot; what `read` is handed is not looked at.
            kept = [
                KeysValues(group.keys[:, :, :1], group.values[:, :, :1])
                for group in cache.groups
            ]
        groups = cache.groups
        # A token that left before this loop wrote no key here: its slot holds old
        # numbers.
        if ran is not None:
            groups = tuple(
                group._replace(hidden=_unwritten(group, cache, ran, b))
                for group in groups
            )
        parts = self.parts(shared_leaves(self.blocks, self.config), own, kept)
        x, groups, _ = self.layers(act, x, groups, parts, entries, cache)
        # The mask is of this call alone: a cache between calls has the tree that
        # `init_cache` gave it.
        groups = tuple(group._replace(hidden=None) for group in groups)
        return x, cache._replace(groups=groups)

    def propagate(
        self, x: Float[Array, "B T D"], b: int, cache: PatternCache, tokens: Tokens
    ) -> PatternCache:
        """Writes the keys and values that tokens which left after b loops lack.

        The state in which they left is taken for the input of every deeper layer:
        k = W_k norm(x), v = W_v norm(x), with that depth's additions. Source: Schuster
        et al. 2022 (CALM), section 3.3.

        Args:
          x: after the last loop run, before the final norm.
        """
        if self.config.loop_cache == "first":
            return cache
        groups = cache.groups
        # Loop after loop on the same x: a deeper layer's own output is never made.
        for deeper in range(b, self.config.loops):
            own, entries = jax.tree.map(lambda leaf, c=deeper: leaf[c], self.turns())
            parts = self.parts(shared_leaves(self.blocks, self.config), own)
            act = writes(tokens)
            _, groups, _ = self.layers(act, x, groups, parts, entries, cache)
        return cache._replace(groups=groups)

    def leaving(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        leave: Callable[[int, Array, Array], Bool[Array, "B T"]],
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
        """Runs whole rows, in which each token leaves when a rule says so.

        A token that has left keeps its state, of which deeper layers make its keys and
        values: what `loop` and `propagate` do token by token, for all at once. With
        loop_cache "first" they need none.

        Args:
          leave: of the number of loops run and the states before and after the last of
            them; it is not asked after the deepest.

        Returns:
          The state in which each token left, and the loops that it ran.
        """
        self.check_cycle("leaving")
        config, cache = self.config, self.init_cache(x.shape[0], 0, x.dtype)
        shared, x = shared_leaves(self.blocks, config), self.enter(x, cache)
        left, ran = jnp.zeros(x.shape[:2], bool), jnp.zeros(x.shape[:2], jnp.int32)
        kept = None
        for b in range(config.loops):
            own, entries = jax.tree.map(lambda leaf, b=b: leaf[b], self.turns())
            act = runs(tokens)
            if config.loop_cache == "first":
                act = reads(tokens, cache) if b else keeps(tokens)
            parts, before = self.parts(shared, own, kept), x
            x, _, made = self.layers(
                holding(act, left), x, cache.groups, parts, entries, cache
            )
            # Counted before the rule is asked: who leaves now has run this loop.
            ran = ran + ~left
            if b + 1 < config.loops:
                if config.loop_cache == "first" and b == 0:
                    kept = made
                left = left | leave(b + 1, before, x)
        return x, ran

    @property
    def exits(self) -> int:
        """After how many loops a token can leave, the deepest included."""
        return self.config.loops

    def refuses_exits(self, missing: str) -> str | None:
        """Says why tokens cannot leave early, or not with these keys and values."""
        config = self.config
        if config.sharing != "cycle" and config.loops > 1:
            return (
                "tokens can leave early only with sharing 'cycle', where fewer loops "
                f"are a model too, not with {config.sharing!r}"
            )
        if (missing == "share") != (config.loop_cache == "first"):
            return (
                "share is for a model with loop_cache 'first', whose deeper loops read "
                f"the keys and values of loop 1, and this one has {config.loop_cache!r}"
                + (": use propagate or skip" if missing == "share" else ": use share")
            )
        return None

    def advance(self, cache: PatternCache, tokens: Tokens) -> PatternCache:
        """Moves every row on by its tokens, after the last loop that it runs."""
        return advanced(cache, cache.groups, tokens.ids.shape[1], tokens)

    def check_cycle(self, name: str) -> None:
        """Raises ValueError unless a model of fewer loops is part of this one."""
        if self.config.sharing != "cycle" and self.config.loops > 1:
            raise ValueError(
                f"{name}: only with sharing 'cycle' is the model with fewer loops part "
                f"of the one with more, got {self.config.sharing!r}"
            )


def _unwritten(
    group: KeyValueCache, cache: PatternCache, ran: Int[Array, "B N"], b: int | Array
) -> Bool[Array, "B S"]:
    """Returns the slots of tokens that left before loop b, when one more is written."""
    at = slot_positions(group.slots, cache.position + 1)
    # An empty slot has a negative position and is unseen whatever is read for it.
    loops = jnp.take_along_axis(ran, jnp.clip(at, 0, ran.shape[1] - 1), axis=1)
    own = at == cache.position[:, None]  # a token always sees itself
    return (loops <= b) & ~own


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
