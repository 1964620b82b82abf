"""A step is one pass through a recursive model's block for slots at mixed loops.

A token that leaves draws its successor, which begins at loop 0 in the next tick; its
neighbours go on where they are. Source: the Relaxed Recursive paper's section 3.8,
which calculates what this runs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Int

from recurjax.exits import exits_of, scores
from recurjax.inference.decoding import cache_dtype
from recurjax.inference.engine.over_depth import OverDepth
from recurjax.inference.engine.slots import Made, Slots, draw
from recurjax.model import Decoder
from recurjax.types import Array, Cache, Lanes, Missing


class Depth(NamedTuple):
    """Where each slot's token stands.

    Attributes:
      loop: that is run next.
      position: of the token.
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
    ) -> tuple[Slots, Made]:
        """Runs each slot's token through its loop; those that leave draw."""
        stack = exits_of(model)
        depth: Depth = slots.depth
        weights, head = weights
        fresh = model.embed(slots.newest[:, None])
        fresh = stack.enter_ticks(fresh, depth.position)
        before = jnp.where((depth.loop == 0)[:, None, None], fresh, depth.x)
        lanes = Lanes(
            loop=depth.loop[:, None],
            position=depth.position[:, None],
            live=slots.active[:, None],
        )
        x, cache = stack.tick(before, lanes, slots.cache, weights, ran=depth.ran)
        # Every loop is read by the model's own final norm and head, as the deepest is.
        normed = model.final_norm(x)
        logits = model.logits(normed)
        score = scores(self.kind, head, lanes.loop, before, x, normed, logits)
        sure = score[:, 0] > slots.wishes.threshold
        leaves = slots.active & (sure | (depth.loop == stack.exits - 1))
        if self.missing == "propagate":
            leaving = lanes._replace(live=leaves[:, None])
            cache = stack.fill_ticks(x, leaving, cache, weights)
        ran, loops = depth.ran, depth.loop + 1
        if ran is not None:
            # Out of range is dropped: a token that goes on has not come to its count.
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
