"""The stack: a scan over loops around the scan over the shared block's layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Bool, Float, Int

from recurjax.layers.attention import KeysValues, KeyValueCache, slot_positions
from recurjax.layers.mesh import UncutStack
from recurjax.layers.position import learned_positions, with_positions
from recurjax.layers.stack import (
    PatternCache,
    advanced,
    loops_a_turn,
    make_blocks,
    scan_layers,
    scan_pattern,
)
from recurjax.types import Array, Cache, Missing, Tokens
from recurjax.variants.rat import RatConfig
from recurjax.variants.rat import stack as rat
from recurjax.variants.relaxed_recursive_transformer.block import (
    BlockAdapters,
    LoopedBlock,
    LoopWeights,
    hold_exited,
    join,
    loop_weights,
    make_adapters,
    make_block,
    one_by_one,
    repeat_vectors,
    run_layer,
    run_layer_keep_kv,
    run_layer_read_kv,
    shared_layers,
    shared_weights,
    write_kv,
)
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.depthwise_batching import (
    DepthwiseBatching,
)
from recurjax.variants.transformer import TransformerConfig
from recurjax.variants.transformer import stack as transformer


class RelaxedRecursiveTransformerStack(
    DepthwiseBatching, UncutStack[RelaxedRecursiveTransformerConfig]
):
    """A block of K layers, run `loops` times; `blocks` as a Transformer's of K layers.

    Untied norms and biases have the loops as one more leading axis. `adapters[p]` has
    the axes [loops, K / P] for place p of a P-pattern: entry [b, r] belongs to the
    block's layer r P + p when it is run for the b-th time, see `depths_of`.
    """

    def __init__(self, config: RelaxedRecursiveTransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        base, loops = config.transformer, config.loops

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> LoopedBlock:
            return make_block(base, place, layer, rngs=rngs)

        blocks = make_blocks(
            block, layers=config.block_layers, pattern=len(base.pattern), rngs=rngs
        )
        if not config.tie_norms:
            blocks = [repeat_vectors(block, loops) for block in blocks]
        self.blocks = nnx.List(blocks)
        position = None
        if isinstance(base, TransformerConfig):
            position = base.attention.position
        self.position = learned_positions(position, base.width, base.init, rngs=rngs)
        # One adapter a depth and none shared: each is drawn from a key of its own.
        adapters = []
        if config.rank:
            shape = (loops, self._repeats)
            for place in range(len(base.pattern)):

                def adapters_at(key: Array, place: int = place) -> BlockAdapters:
                    return make_adapters(config, place, rngs=nnx.Rngs(params=key))

                keys = jax.random.split(rngs.params(), shape)
                adapters.append(jax.vmap(jax.vmap(adapters_at))(keys))
        self.adapters = nnx.List(adapters) if adapters else None

    @property
    def _repeats(self) -> int:
        # K / P: a place of the pattern is one module that stacks K / P layers.
        return self.config.block_layers // len(self.config.transformer.pattern)

    def init_cache(self, batch: int, length: int, dtype) -> PatternCache:
        """Creates the cache for `length` tokens per row; a window's is a ring buffer.

        It has an entry for each depth, or for each layer of the block where deeper
        loops read what loop 1 wrote.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: dtype of keys and values.

        Raises:
          ValueError: learned positions end before `length`.
        """
        loops = self.config.loops if self.config.loop_cache == "own" else 1
        base, entries = self.config.transformer, loops * self._repeats
        sizes = (batch, length, dtype)
        match base:
            case TransformerConfig():
                by_place = [entries] * len(base.pattern)
                return transformer.empty_cache(base, by_place, *sizes)
            case RatConfig():
                return rat.empty_cache(self.blocks, entries, *sizes)

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Returns why rows of `length` tokens cannot train on a mesh, or None."""
        base = self.config.transformer
        if isinstance(base, RatConfig):
            return rat.refuse_mesh(base, mesh, length)
        return super().refuses(mesh, length)

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
        self._check_cycle("states")
        _, after, cache = self._run(x, cache, tokens, states=True)
        return after, cache

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first depth, and what leaves each: `one_by_one`."""
        config, cache = self.config, self.init_cache(x.shape[0], 0, x.dtype)
        shared, (loops, _) = shared_weights(self.blocks, config), self._turns()
        parts = [
            self._parts(shared, jax.tree.map(lambda leaf, b=b: leaf[b], loops))
            for b in range(config.loops)
        ]
        order = shared_layers(config.layers, config.loops, config.sharing)
        on_first, x = config.loop_cache == "first", self.enter(x, cache)
        return one_by_one(x, parts, order, cache, tokens, on_first=on_first)

    # Early exits: a caller runs loops one by one and decides where each token leaves.

    @property
    def exits(self) -> int:
        """After how many loops a token can leave, the deepest included."""
        return self.config.loops

    @property
    def missing(self) -> Missing:
        """How deeper loops read a token that exited, as the model was trained."""
        return "share" if self.config.loop_cache == "first" else "propagate"

    def refuses_exits(self, missing: Missing) -> str | None:
        """Returns why tokens cannot leave early, or not with these keys and values."""
        config = self.config
        if config.sharing != "cycle" and config.loops > 1:
            return (
                "early exits need sharing 'cycle', where fewer loops are a model "
                f"too, got {config.sharing!r}"
            )
        if (missing == "share") != (config.loop_cache == "first"):
            return (
                "share is for a model with loop_cache 'first', whose deeper loops read "
                f"the keys and values of loop 1, and this one has {config.loop_cache!r}"
                + (": use propagate or skip" if missing == "share" else ": use share")
            )
        if missing == "skip" and isinstance(config.transformer, RatConfig):
            return (
                "skip hides the keys that a token which left did not write, and a "
                "RatConfig's mixers also have states: use propagate"
            )
        return None

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
        """Runs one loop, for a caller that decides after each whether to continue.

        The rows keep their positions until `advance`, when a token has left.

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
        self._check_cycle("loop")
        first = self.config.loop_cache == "first"
        if cache.training:
            raise ValueError("loop: cache must have a length of at least 1")
        if first and not (isinstance(b, int) and x.shape[1] == 1):
            raise ValueError(
                "loop: loop_cache 'first' needs one token per call, and b as an int"
            )
        kv, act = None, run_layer(tokens)
        if first and b:
            act = run_layer_read_kv(tokens, cache)
            # One token is read from its slot, so only the shape of `kv` matters.
            kv = [
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
        x, groups, _ = self._run_loop(b, act, x, groups, cache, kv)
        # The mask is of this call alone: a cache between calls has the tree that
        # `init_cache` gave it.
        if ran is not None:
            groups = tuple(group._replace(hidden=None) for group in groups)
        return x, cache._replace(groups=groups)

    def propagate(
        self, x: Float[Array, "B T D"], b: int, cache: PatternCache, tokens: Tokens
    ) -> PatternCache:
        """Writes the keys and values that tokens which left after b loops lack.

        The state in which they left is taken for the input of every deeper layer:
        k = W_k norm(x), v = W_v norm(x), with that depth's additions. States are
        advanced by it in the same way. Source: Schuster et al. 2022 (CALM), section
        3.3.

        Args:
          x: after the last loop run, before the final norm.
        """
        if self.config.loop_cache == "first":
            return cache
        groups = cache.groups
        # Runs loop by loop on the same x: a deeper layer's own output is not computed.
        for deeper in range(b, self.config.loops):
            _, groups, _ = self._run_loop(deeper, write_kv(tokens), x, groups, cache)
        return cache._replace(groups=groups)

    def advance(self, cache: PatternCache, tokens: Tokens) -> PatternCache:
        """Moves every row on by its tokens, after the last loop that it runs."""
        return advanced(cache, cache.groups, tokens.ids.shape[1], tokens)

    def leaving(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        leave: Callable[[int, Array, Array], Bool[Array, "B T"]],
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
        """Runs entire rows, in which each token leaves when a rule says so.

        A token that has left keeps its state, of which deeper layers make its keys and
        values: what `loop` and `propagate` do token by token, for all at once. With
        loop_cache "first" they need none.

        Args:
          leave: of the number of loops run and the states before and after the last of
            them; the deepest loop does not call it.

        Returns:
          The state in which each token left, and the loops that it ran.
        """
        self._check_cycle("leaving")
        config, cache = self.config, self.init_cache(x.shape[0], 0, x.dtype)
        x = self.enter(x, cache)
        exited, ran = jnp.zeros(x.shape[:2], bool), jnp.zeros(x.shape[:2], jnp.int32)
        on_first, kv = config.loop_cache == "first", None
        for b in range(config.loops):
            act = run_layer(tokens)
            if on_first:
                act = (
                    run_layer_read_kv(tokens, cache) if b else run_layer_keep_kv(tokens)
                )
            before, act = x, hold_exited(act, exited)
            x, _, new = self._run_loop(b, act, x, cache.groups, cache, kv)
            # Counted before the rule is called: a token that leaves here has run this
            # loop.
            ran = ran + ~exited
            if b + 1 < config.loops:
                if on_first and b == 0:
                    kv = new
                exited = exited | leave(b + 1, before, x)
        return x, ran

    def repeating(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        loops: Int[Array, ""],
        *,
        last: int,
    ) -> Float[Array, "B T D"]:
        """Runs entire rows for a number of loops that only the running program knows.

        Loops beyond the model's take the deepest one's additions and norms.

        Args:
          loops: at least 1.
          last: gradients pass through the last `last` loops, and stop before them.
        """
        self._check_cycle("repeating")
        cache, act = self.init_cache(x.shape[0], 0, x.dtype), run_layer(tokens)

        def run(
            stack: "RelaxedRecursiveTransformerStack", b: Int[Array, ""], x: Array
        ) -> Array:
            b = jnp.minimum(b, self.config.loops - 1)
            return stack._run_loop(b, act, x, cache.groups, cache)[0]

        early = jnp.maximum(loops - last, 0)
        x = self.enter(x, cache)
        # A loop of unknown length has no reverse pass: nothing in it is differentiated.
        frozen, x_frozen = jax.lax.stop_gradient((self, x))
        deep = jax.lax.fori_loop(0, early, partial(run, frozen), x_frozen)
        x = jnp.where(early > 0, deep, x)
        for n in range(last):
            b = early + n
            x = jnp.where(b < loops, run(self, b, x), x)
        return x

    def _check_cycle(self, name: str) -> None:
        """Raises ValueError unless a model of fewer loops is part of this one."""
        if self.config.sharing != "cycle" and self.config.loops > 1:
            raise ValueError(
                f"{name} needs sharing 'cycle', where fewer loops are part of the "
                f"same model, got {self.config.sharing!r}"
            )

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
        shared, act = shared_weights(self.blocks, self.config), run_layer(tokens)

        def loop(carry, turn, *, reverse: bool = False):
            x, groups = carry
            weights, entries = turn
            parts = self._parts(shared, weights)
            x, groups, _ = self._layers(
                act, x, groups, parts, entries, cache, reverse=reverse
            )
            # Only where a caller reads them: training would hold every loop's stream
            # for nothing.
            return (x, groups), x if states else None

        forward, last = self._split_reversed(self._turns())
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
        shared, (_, entries) = shared_weights(self.blocks, self.config), self._turns()
        keep, entries = run_layer_keep_kv(tokens), entries[0]
        x, written, kv = self._run_loop(0, keep, x, cache.groups, cache)
        read, after_first = run_layer_read_kv(tokens, cache), x

        def loop(x, turn, *, reverse: bool = False):
            parts = self._parts(shared, turn[0], kv)
            # The cache that comes out is dropped: a deeper loop writes nothing.
            x, _, _ = self._layers(
                read, x, written, parts, entries, cache, reverse=reverse
            )
            return x, x if states else None

        forward, last = self._split_reversed(self._turns(start=1))
        after = None
        if forward is not None:
            x, after = _over_loops(loop, x, forward, cache)
        if last is not None:
            # No caller reads its state after the loop: exits need sharing "cycle".
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
        on_first = self.config.loop_cache == "first" and self.config.loops > 1
        act, read = run_layer(tokens), run_layer_read_kv(tokens, cache)
        if on_first:
            act = run_layer_keep_kv(tokens)

        def repeat(carry, turn):
            x, groups = carry
            shared, (loops, entries) = turn  # of one repeat; by loop, [loops, ...]
            written = []
            for place, group in enumerate(groups):

                def use(act, kv, _, weights, x, group, place=place):
                    block = join(
                        self.blocks[place], self.config, shared[place], weights
                    )
                    return act(place, (block, kv), x, group)

                uses = (loops[place], entries)
                # The first use makes keys and values, so it cannot share the others'
                # scan.
                if on_first:
                    x, group, new = self._uses(
                        partial(use, act, None), x, group, _slice(uses, 0, 1), cache
                    )
                    kv = jax.tree.map(lambda leaf: leaf[0], new)
                    rest = _slice(uses, 1, None)
                    x, group, _ = self._uses(
                        partial(use, read, kv), x, group, rest, cache
                    )
                else:
                    x, group, _ = self._uses(
                        partial(use, act, None), x, group, uses, cache
                    )
                written.append(group)
            return (x, tuple(written)), None

        # By repeat of the pattern first, as the outer scan here goes over layers.
        by_repeat = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), self._turns())
        (x, groups), _ = _scan(
            repeat,
            (x, cache.groups),
            (shared_weights(self.blocks, self.config), by_repeat),
            cache,
        )
        return x, groups

    def _uses(
        self, act: Callable, x: Array, group: Cache, uses: Any, cache: PatternCache
    ) -> tuple[Array, Cache, Any]:
        """Runs one layer once for each of the given uses."""
        weights, entries = uses
        x, (group,), (new,) = self._layers(act, x, (group,), (weights,), entries, cache)
        return x, group, new

    def _run_loop(
        self,
        b: int | Array,
        act: Callable,
        x: Array,
        groups: tuple[Cache, ...],
        cache: PatternCache,
        kv: Any = None,
    ) -> tuple[Array, tuple[Cache, ...], tuple[Any, ...]]:
        """Runs the layers of loop b; see `_layers` and `_parts`."""
        weights, entries = jax.tree.map(lambda leaf: leaf[b], self._turns())
        parts = self._parts(shared_weights(self.blocks, self.config), weights, kv)
        return self._layers(act, x, groups, parts, entries, cache)

    def _layers(
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

    def _parts(self, shared, loop, kv=None) -> tuple[Any, ...]:
        """Returns what `_layers` scans over: blocks, and loop 1's keys and values."""
        kv = [None] * len(loop) if kv is None else kv
        return tuple(
            (join(self.blocks[place], self.config, matrices, weights), pair)
            for place, (matrices, weights, pair) in enumerate(
                zip(shared, loop, kv, strict=True)
            )
        )

    def _turns(self, start: int = 0) -> tuple[tuple[LoopWeights, ...], Array]:
        """Returns each loop's own weights and cache entries: [loops, K / P, ...].

        Args:
          start: the first loop returned.
        """
        weights = loop_weights(self.blocks, self.adapters, self.config)
        loops, repeats = self.config.loops, self._repeats
        # Loop b's r-th layer of a place has entry b K / P + r of that place's cache;
        # where all loops read loop 1's, only r counts.
        entries = jnp.arange(loops * repeats, dtype=jnp.int32).reshape(loops, repeats)
        if self.config.loop_cache == "first":
            entries = entries % repeats
        return _slice((weights, entries), start, None)

    def _split_reversed(self, turns: Any) -> tuple[Any, Any]:
        """Returns the loops that run forwards, and the last one if it runs backwards.

        Either may be None.
        """
        if self.config.sharing != "cycle_rev" or self.config.loops == 1:
            return turns, None
        last = jax.tree.map(lambda leaf: leaf[-1], turns)
        count = turns[1].shape[0] - 1
        return (_slice(turns, 0, count) if count else None), last


def _over_loops(body: Callable, carry: Any, turns: Any, cache: PatternCache):
    """Scans over loops; runs a single one without a scan, as the Transformer does."""
    if turns[1].shape[0] > 1:
        return _scan(body, carry, turns, cache)
    carry, out = body(carry, jax.tree.map(lambda leaf: leaf[0], turns))
    return carry, jax.tree.map(lambda leaf: leaf[None], out)


def _scan(body: Callable, carry: Any, turns: Any, cache: PatternCache):
    """Scans without rematerialization: the layers inside rematerialize."""
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


def _slice(turns: Any, start: int, stop: int | None) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], turns)


def _unwritten(
    group: KeyValueCache, cache: PatternCache, ran: Int[Array, "B N"], b: int | Array
) -> Bool[Array, "B S"]:
    """Returns the slots of tokens that left before loop b, when one more is written."""
    at = slot_positions(group.slots, cache.position + 1)
    # An empty slot has a negative position and is unseen whatever is read for it.
    loops = jnp.take_along_axis(ran, jnp.clip(at, 0, ran.shape[1] - 1), axis=1)
    current = at == cache.position[:, None]  # a token always sees itself
    return (loops <= b) & ~current
