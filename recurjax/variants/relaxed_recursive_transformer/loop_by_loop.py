"""The loops one by one: for engines, and for tokens that leave early."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from recurjax.layers.attention import KeysValues, KeyValueCache, slot_positions
from recurjax.layers.position import with_positions
from recurjax.layers.stack import PatternCache, advanced
from recurjax.types import Array, Tokens
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.relaxed_recursive_transformer.layer_runs import (
    holding,
    keeps,
    reads,
    runs,
    writes,
)
from recurjax.variants.relaxed_recursive_transformer.uses import shared_leaves


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
