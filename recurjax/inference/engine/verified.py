"""Tokens go on through all loops while their successors start from an exit's guess.

A slot has a lane for each loop, and a step is one pass of the block for all lanes:
lane l runs loop l, and its token moves to lane l + 1. Once a rule trusts a token's
state, its likeliest successor enters lane 0 as a guess. When a token leaves the last
lane, the full model has said what follows it: a guess that says the same goes on,
another one is rolled back, with all that was started from it. Only what the full model
said is handed out, so that greedy texts are its own, whatever the rule; good guesses
make them come sooner.

What was rolled back has left keys in the cache. They lie behind every token that reads,
so nobody sees them, and the tokens that come to these places overwrite them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from recurjax.exits import exits_of, scores
from recurjax.inference.decoding import cache_dtype
from recurjax.inference.engine.over_depth import OverDepth
from recurjax.inference.engine.slots import Made, Slots, draw
from recurjax.model import Decoder
from recurjax.types import Array, Cache, Lanes


class Flight(NamedTuple):
    """The tokens on their way in each slot: lane l holds the one that runs loop l next.

    Attributes:
      x: the state that enters the loop; of lane 0 the embedding of `Slots.newest` does.
      position: of the token; a deeper lane's comes earlier.
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
    """Guesses by a rule."""

    def empty(self, model: Decoder, rows: int, length: int) -> tuple[Cache, Flight]:
        """Slots with nothing on its way."""
        stack = exits_of(model)
        R, width = stack.exits, model.config.stack.width
        zeros = jnp.zeros((rows, R), jnp.int32)
        flight = Flight(
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
        return cache, flight

    def put(
        self,
        model: Decoder,
        slots: Slots,
        row: Int[Array, ""],
        read: Cache,
        *,
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Cache, Flight]:
        """The first new token enters lane 0; it is no guess."""
        stack = exits_of(model)
        flight: Flight = slots.depth
        flight = flight._replace(
            position=flight.position.at[row, 0].set(length),
            live=flight.live.at[row].set(False).at[row, 0].set(True),
            guess=flight.guess.at[row, 0].set(-1),
            # The first token was drawn from the prompt, and the last one is never read.
            last=flight.last.at[row].set(length + limit - 2),
        )
        return stack.insert_ticks(slots.cache, row, read), flight

    def step(
        self, model: Decoder, weights: Any, slots: Slots, *, top: int
    ) -> tuple[Slots, Made]:
        """Runs all lanes; a slot draws when a token leaves the last one."""
        stack = exits_of(model)
        flight: Flight = slots.depth
        R = stack.exits
        weights, head = weights
        fresh = model.embed(slots.newest[:, None])
        fresh = stack.enter_ticks(fresh, flight.position[:, 0])
        before = flight.x.at[:, :1].set(fresh)
        loop = jnp.broadcast_to(jnp.arange(R, dtype=jnp.int32), flight.position.shape)
        live = flight.live & slots.active[:, None]
        lanes = Lanes(loop=loop, position=flight.position, live=live)
        x, cache = stack.tick(before, lanes, slots.cache, weights)
        normed = model.final_norm(x)
        logits = model.logits(normed)

        # The full model's word, for the token in the last lane.
        final = live[:, -1]
        told = jnp.where(final, flight.left[:, -1], R)
        slots, made = draw(slots, logits[:, -1], final, told, top=top)
        wrong = final & (slots.newest != flight.guess[:, -1])
        made = made._replace(loops=jnp.where(wrong, R, made.loops))
        # All other lanes hold successors of that token.
        live = live & ~wrong[:, None] & slots.active[:, None]

        # Only the newest token has no guess yet; the others go on.
        score = scores(self.kind, head, loop, before, x, normed, logits)
        sure = live & (flight.guess < 0) & (score > slots.wishes.threshold[:, None])
        sure &= (flight.position < flight.last[:, None]) & (loop < R - 1)
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        guess = jnp.where(sure, likeliest, flight.guess)
        left = jnp.where(sure, loop + 1, flight.left)

        # What enters lane 0: the token that the full model said, or the new guess.
        begins = slots.active & (wrong | sure.any(1))
        chosen = jnp.sum(jnp.where(sure, likeliest, 0), axis=1, dtype=jnp.int32)
        after = jnp.where(sure, flight.position + 1, 0)
        after = jnp.sum(after, axis=1, dtype=jnp.int32)
        after = jnp.where(wrong, flight.position[:, -1] + 1, after)
        slots = slots._replace(
            cache=cache,
            newest=jnp.where(wrong, slots.newest, chosen),
            depth=Flight(
                x=_moved(x, x[:, 0]),
                position=_moved(flight.position, after),
                live=_moved(live, begins),
                guess=_moved(guess, jnp.full_like(after, -1)),
                left=_moved(left, jnp.zeros_like(after)),
                last=flight.last,
            ),
        )
        return slots, made


def _moved(lanes: Array, first: Array) -> Array:
    """Moves every lane to the next loop; the last one's token has left."""
    return jnp.concatenate([first[:, None], lanes[:, :-1]], axis=1)
