"""Rows that stand at different places of their chunks, laid so that chunks line up.

A row that continues at offset o = position mod C lays its T new tokens at places o, o +
1, ... of whole chunks, so that place i is in chunk position // C + i // C in every row.
Other places are padding: a gate of 1 carries the state across them. A single token
needs no laying out: it is a chunk of one place.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Int, Shaped

from recurjax.types import Array


class Alignment(NamedTuple):
    """Where T new tokens of each row lie.

    Attributes:
      position: of the first one.
      count: how many are real.
      chunk: C.
      size: places in a chunk: C, or 1 for a single token.
      places: in all; a multiple of `size`.
    """

    position: Int[Array, " B"]
    count: Int[Array, " B"]
    chunk: int
    size: int
    places: int

    @property
    def first(self) -> Int[Array, " B"]:
        """Number of the chunk that place 0 is in."""
        return self.position // self.chunk

    @property
    def offset(self) -> Int[Array, " B"]:
        """How many tokens of the first chunk came before."""
        return self.position % self.chunk

    @property
    def shift(self) -> Int[Array, " B"]:
        """The place of the first token."""
        return jnp.zeros_like(self.position) if self.size == 1 else self.offset

    @property
    def numbers(self) -> Int[Array, "B G"]:
        """Numbers of the chunks laid out."""
        return self.first[:, None] + jnp.arange(self.places // self.size)

    @property
    def positions(self) -> Int[Array, "B P"]:
        """Position of each place in its sequence."""
        return (self.position - self.shift)[:, None] + jnp.arange(self.places)

    @property
    def real(self) -> Bool[Array, "B P"]:
        """Which places hold new tokens."""
        # Counted from the first new token: negative before it, `count` after the last.
        place = jnp.arange(self.places) - self.shift[:, None]
        return (place >= 0) & (place < self.count[:, None])

    @property
    def ended(self) -> Bool[Array, "B G"]:
        """Which chunks have their last token among the new ones."""
        # Where each laid-out chunk ends, counted in places; a row without new tokens
        # completes nothing.
        ends = self.chunk * (1 + jnp.arange(self.places // self.size))
        return (self.count > 0)[:, None] & (ends <= (self.offset + self.count)[:, None])

    def lay(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B P *rest"]:
        """Moves new tokens to their places, zeros elsewhere."""
        if self.size == 1:
            return x
        index = jnp.clip(
            jnp.arange(self.places) - self.shift[:, None], 0, x.shape[1] - 1
        )
        laid = x[jnp.arange(x.shape[0])[:, None], index]
        real = self.real.reshape(*self.real.shape, *[1] * (x.ndim - 2))
        return jnp.where(real, laid, 0)

    def pick(
        self, laid: Shaped[Array, "B P *rest"], length: int
    ) -> Shaped[Array, "B T *rest"]:
        """Moves T tokens back from their places."""
        if self.size == 1:
            return laid
        index = self.shift[:, None] + jnp.arange(length)
        return laid[jnp.arange(laid.shape[0])[:, None], index]


def align(
    position: Int[Array, " B"], length: int, lengths: Array | None, chunk: int
) -> Alignment:
    """Lays out T = `length` tokens, the first `lengths` of each row real."""
    count = jnp.full_like(position, length) if lengths is None else lengths
    # One token needs no layout. More of them: the worst offset is C - 1, so T + C - 1
    # places, in whole chunks, are enough for every row.
    size = 1 if length == 1 else chunk
    places = 1 if length == 1 else -(-(length + chunk - 1) // chunk) * chunk
    return Alignment(position, count, chunk, size, places)
