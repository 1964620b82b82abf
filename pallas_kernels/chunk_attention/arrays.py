"""What positions attend to beside themselves: the ends of chunks."""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int

Array = jax.Array


class ChunkEnds(NamedTuple):
    """Keys and values of chunks 0, 1, ..., S - 1 of every row.

    Heads come before chunks: a step of generation reads a head's keys in one piece.

    Attributes:
      keys: after position encoding.
      values: as keys.
      documents: the document that each chunk's end belongs to; None: all are one.
    """

    keys: Float[Array, "B H S E"]
    values: Float[Array, "B H S E"]
    documents: Int[Array, "B S"] | None = None
