"""A step runs the whole model for the newest token of every slot."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Int

from recurjax.inference.decoding import cache_dtype
from recurjax.inference.engine.slots import Made, Slots, draw
from recurjax.model import Decoder
from recurjax.types import Array, Cache, Tokens


@dataclass(frozen=True)
class SequenceWise:
    """The way of every variant, through the stack protocol alone."""

    def weights(self, model: Decoder) -> Any:
        """Nothing but the model."""
        del model

    def loops(self, model: Decoder) -> int:
        """Tokens do not leave early."""
        return 0

    def empty(self, model: Decoder, rows: int, length: int) -> tuple[Cache, Any]:
        """The model's own cache; every token has gone through the stack."""
        return model.init_cache(rows, length, cache_dtype(model)), None

    def put(
        self,
        model: Decoder,
        slots: Slots,
        row: Int[Array, ""],
        read: Cache,
        *,
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Cache, Any]:
        """The stack knows which axes of its cache count rows."""
        del length, limit
        return model.stack.insert(slots.cache, row, read), None

    def step(
        self, model: Decoder, weights: Any, slots: Slots, *, top: int
    ) -> tuple[Slots, Made]:
        """Reads each active slot's newest token and draws the next."""
        # A length of 0 is a token that is not there, for attention and recurrent
        # states.
        lengths = slots.active.astype(jnp.int32)
        tokens = Tokens(slots.newest[:, None], lengths=lengths)
        x, cache = model.hidden(tokens, slots.cache)
        slots = slots._replace(cache=cache)
        loops = jnp.zeros_like(slots.newest)
        return draw(slots, model.logits(x[:, 0]), slots.active, loops, top=top)
