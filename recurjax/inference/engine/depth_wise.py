"""Engines over depth: a step is one pass of a recursive model's block.

Slots hold tokens at mixed loops. Source: the Relaxed Recursive paper's section 3.8,
which calculates what this runs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from recurjax.exits import ExitHead, RuleKind, exits_of, scores
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.inference.engine.slots import Outputs, Slots, draw
from recurjax.model import Decoder
from recurjax.types import Array, Cache, LoopPositions, Missing


@dataclass(frozen=True, kw_only=True)
class OverDepth:
    """A step is one pass of the block; a rule says which tokens it trusts.

    The rule's threshold is each request's.

    Attributes:
      kind: kind of the rule.
    """

    kind: RuleKind

    def weights(
        self, model: Decoder, head: ExitHead | None = None
    ) -> tuple[Any, ExitHead | None]:
        """The loops' weights, laid out for ticks, and the head of the rule "head"."""
        return exits_of(model).tick_weights(), head

    def loops(self, model: Decoder) -> int:
        """All that the stack has."""
        return exits_of(model).exits

    @property
    def most_tokens(self) -> int:
        """The successor of the token that leaves."""
        return 1


class Depth(NamedTuple):
    """The loop and position of each slot's token.

    Attributes:
      loop: the loop that is run next.
      position: position of the token.
      x: the state that enters the loop; at loop 0 the token's embedding does.
      ran: how many loops the token at each position has run, where the places that are
        missing deeper are skipped; else None.
    """

    loop: Int[Array, " B"]
    position: Int[Array, " B"]
    x: Float[Array, "B 1 D"]
    ran: Int[Array, "B P"] | None


@dataclass(frozen=True, kw_only=True)
class DepthWise(OverDepth):
    """Tokens leave by a rule.

    Attributes:
      missing: what becomes of the keys and values that they then lack.
    """

    missing: Missing

    def empty(self, model: Decoder, rows: int, length: int) -> tuple[Cache, Depth]:
        """Slots at loop 0 of nothing."""
        stack = exits_of(model)
        ran = None
        if self.missing == "skip":
            ran = jnp.full((rows, length), stack.exits, jnp.int32)
        zeros = jnp.zeros(rows, jnp.int32)
        width = model.config.stack.width
        x = jnp.zeros((rows, 1, width), model.config.dtype)
        cache = stack.init_ticks(rows, length, cache_dtype(model))
        return cache, Depth(loop=zeros, position=zeros, x=x, ran=ran)

    def put(
        self,
        model: Decoder,
        slots: Slots,
        row: Int[Array, ""],
        read: Cache,
        *,
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Cache, Depth]:
        """The first new token begins at loop 0; the prompt has run all loops."""
        del limit
        stack = exits_of(model)
        depth: Depth = slots.depth
        ran = depth.ran
        if ran is not None:
            ran = ran.at[row].set(stack.exits)
        depth = depth._replace(
            loop=depth.loop.at[row].set(0),
            position=depth.position.at[row].set(length),
            ran=ran,
        )
        return stack.insert_ticks(slots.cache, row, read), depth

    def step(
        self, model: Decoder, weights: Any, slots: Slots, *, top: int
    ) -> tuple[Slots, Outputs]:
        """Runs each slot's token through its loop; those that leave draw."""
        stack = exits_of(model)
        depth: Depth = slots.depth
        weights, head = weights
        fresh = model.embed(slots.newest[:, None])
        fresh = stack.enter_ticks(fresh, depth.position)
        before = jnp.where((depth.loop == 0)[:, None, None], fresh, depth.x)
        lanes = LoopPositions(
            loop=depth.loop[:, None],
            position=depth.position[:, None],
            live=slots.active[:, None],
        )
        x, cache = stack.tick(before, lanes, slots.cache, weights, ran=depth.ran)
        # Every loop is read by the model's own final norm and head, as the deepest is.
        normed = model.final_norm(x)
        logits = model.logits(normed)
        score = scores(self.kind, head, lanes.loop, before, x, normed, logits)
        sure = score[:, 0] > slots.params.threshold
        leaves = slots.active & (sure | (depth.loop == stack.exits - 1))
        if self.missing == "propagate":
            leaving = lanes._replace(live=leaves[:, None])
            cache = stack.fill_ticks(x, leaving, cache, weights)
        ran, loops = depth.ran, depth.loop + 1
        if ran is not None:
            # Out of range is dropped: a token that continues has not come to its count.
            at = jnp.where(leaves, depth.position, ran.shape[1])
            ran = ran.at[jnp.arange(at.shape[0]), at].set(loops, mode="drop")
        slots = slots._replace(
            cache=cache,
            depth=Depth(
                loop=jnp.where(leaves, 0, loops),
                position=depth.position + leaves,
                x=x,
                ran=ran,
            ),
        )
        return draw(slots, logits[:, 0], leaves, loops, top=top)


class Pipeline(NamedTuple):
    """The tokens on their way in each slot: lane l holds the one that runs loop l next.

    Attributes:
      x: the state that enters the loop; of lane 0 the embedding of `Slots.newest` does.
      position: position of the token; a deeper lane's comes earlier.
      live: whether a lane holds a token.
      guess: what its successor was started from; -1: it has none yet.
      left: after how many loops that was.
      last: the last position that has to be read for the tokens that are wanted.
    """

    x: Float[Array, "B T D"]
    position: Int[Array, "B T"]
    live: Bool[Array, "B T"]
    guess: Int[Array, "B T"]
    left: Int[Array, "B T"]
    last: Int[Array, " B"]


@dataclass(frozen=True, kw_only=True)
class Verified(OverDepth):
    """Successors start from an exit's guess, and the full model verifies it.

    A slot has a lane for each loop, and a step is one pass of the block for all lanes:
    lane l runs loop l, and its token moves to lane l + 1. Once the rule trusts a
    token's state, its likeliest successor enters lane 0 as a guess. When a token leaves
    the last lane, the full model has said what follows it. A guess that says the same
    continues; another one is rolled back, with all that started from it. Only what the
    full model said is handed out, so that greedy texts are its own, whatever the rule;
    good guesses make them come sooner.

    A token that is rolled back leaves keys in the cache. They are at later positions
    than every token that reads, so that causality hides them, and the tokens that come
    to these positions overwrite them.
    """

    def empty(self, model: Decoder, rows: int, length: int) -> tuple[Cache, Pipeline]:
        """Slots with nothing on its way."""
        stack = exits_of(model)
        R, width = stack.exits, model.config.stack.width
        zeros = jnp.zeros((rows, R), jnp.int32)
        pipeline = Pipeline(
            x=jnp.zeros((rows, R, width), model.config.dtype),
            position=zeros,
            live=zeros.astype(bool),
            guess=zeros,
            left=zeros,
            last=jnp.zeros(rows, jnp.int32),
        )
        # Tokens that are rolled back must not have overwritten, in a window's ring,
        # what the token in their place still sees.
        cache = stack.init_ticks(rows, length, cache_dtype(model), ahead=R - 1)
        return cache, pipeline

    def put(
        self,
        model: Decoder,
        slots: Slots,
        row: Int[Array, ""],
        read: Cache,
        *,
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Cache, Pipeline]:
        """The first new token enters lane 0; it is not a guess."""
        stack = exits_of(model)
        pipeline: Pipeline = slots.depth
        pipeline = pipeline._replace(
            position=pipeline.position.at[row, 0].set(length),
            live=pipeline.live.at[row].set(False).at[row, 0].set(True),
            guess=pipeline.guess.at[row, 0].set(-1),
            # The first token was drawn from the prompt, and the last one is never read.
            last=pipeline.last.at[row].set(length + limit - 2),
        )
        return stack.insert_ticks(slots.cache, row, read), pipeline

    def step(
        self, model: Decoder, weights: Any, slots: Slots, *, top: int
    ) -> tuple[Slots, Outputs]:
        """Runs all lanes; a slot draws when a token leaves the last one."""
        stack = exits_of(model)
        pipeline: Pipeline = slots.depth
        R = stack.exits
        weights, head = weights
        fresh = model.embed(slots.newest[:, None])
        fresh = stack.enter_ticks(fresh, pipeline.position[:, 0])
        before = pipeline.x.at[:, :1].set(fresh)
        loop = jnp.broadcast_to(jnp.arange(R, dtype=jnp.int32), pipeline.position.shape)
        live = pipeline.live & slots.active[:, None]
        lanes = LoopPositions(loop=loop, position=pipeline.position, live=live)
        x, cache = stack.tick(before, lanes, slots.cache, weights)
        normed = model.final_norm(x)
        logits = model.logits(normed)

        # The full model's prediction, for the token in the last lane.
        final = live[:, -1]
        loops = jnp.where(final, pipeline.left[:, -1], R)
        slots, outputs = draw(slots, logits[:, -1], final, loops, top=top)
        wrong = final & (slots.newest != pipeline.guess[:, -1])
        loops = jnp.where(wrong[:, None], R, outputs.loops)
        outputs = outputs._replace(loops=loops)
        # All other lanes hold successors of that token.
        live = live & ~wrong[:, None] & slots.active[:, None]

        # Only the newest token has no guess yet; the others continue.
        score = scores(self.kind, head, loop, before, x, normed, logits)
        sure = live & (pipeline.guess < 0) & (score > slots.params.threshold[:, None])
        sure &= (pipeline.position < pipeline.last[:, None]) & (loop < R - 1)
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        guess = jnp.where(sure, likeliest, pipeline.guess)
        left = jnp.where(sure, loop + 1, pipeline.left)

        # The input of lane 0: the full model's token, or the new guess.
        begins = slots.active & (wrong | sure.any(1))
        exit_ids = jnp.sum(jnp.where(sure, likeliest, 0), axis=1, dtype=jnp.int32)
        after = jnp.where(sure, pipeline.position + 1, 0)
        after = jnp.sum(after, axis=1, dtype=jnp.int32)
        after = jnp.where(wrong, pipeline.position[:, -1] + 1, after)
        slots = slots._replace(
            cache=cache,
            newest=jnp.where(wrong, slots.newest, exit_ids),
            depth=Pipeline(
                x=_moved(x, x[:, 0]),
                position=_moved(pipeline.position, after),
                live=_moved(live, begins),
                guess=_moved(guess, jnp.full_like(after, -1)),
                left=_moved(left, jnp.zeros_like(after)),
                last=pipeline.last,
            ),
        )
        return slots, outputs


def _moved(lanes: Array, first: Array) -> Array:
    """Moves every lane to the next loop; the last one's token has left."""
    return jnp.concatenate([first[:, None], lanes[:, :-1]], axis=1)
