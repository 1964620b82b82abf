"""What positions attend to beside themselves: the ends of chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
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


def at_least_one(ends: ChunkEnds) -> ChunkEnds:
    """Gives a call without any chunk end one, of zeros: no position sees it.

    Kernels cannot read arrays without elements.
    """
    S = ends.keys.shape[2]
    if S:
        return ends
    one = ((0, 0), (0, 0), (0, 1), (0, 0))
    known = ends.documents
    return ChunkEnds(
        keys=jnp.pad(ends.keys, one),
        values=jnp.pad(ends.values, one),
        documents=None if known is None else jnp.pad(known, ((0, 0), (0, 1))),
    )


def operands(q: Array, own_values: Array, ends: ChunkEnds) -> dict[str, Array]:
    """Returns by name what a kernel multiplies: it has to compute in their dtypes."""
    return {
        "q": q,
        "own_values": own_values,
        "ends.keys": ends.keys,
        "ends.values": ends.values,
    }
