"""A call of the op: its arrays, the ends of chunks among them, options, block sizes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.block_sizes import GivenSizes

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """Block sizes of a call; None: the backend chooses.

    Attributes:
      block_q: positions of one program. On a GPU those of the ends' gradient are apart.
      block_k: chunk ends that are read at once; on a GPU likewise.
      backward_block_q: positions that a program of the ends' gradient reads at once.
      backward_block_k: its chunk ends.
      splits: programs that share the heads of a query group in the queries' gradient.
      warps: warps of a program.
      stages: blocks of ends, or of positions, that are on their way at once.
    """

    block_q: int | None = None
    block_k: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None
    splits: int | None = None
    warps: int | None = None
    stages: int | None = None


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkAttentionOptions:
    """The static options of a call.

    Attributes:
      chunk: C, in positions.
      scale: multiplies all logits.
      blocks: sizes of the caller's; the backend chooses what they leave out.
      interpret: runs kernels as plain JAX, on any device; pltpu.InterpretParams: with
        the TPU's own semantics.
    """

    chunk: int
    scale: float
    blocks: BlockSizes = BlockSizes()
    interpret: Any = False


class ChunkAttentionCall(NamedTuple):
    """The arguments of every backend; with gradients in place of arrays, its results.

    `chunk_attention` says what the arrays are.
    """

    q: Float[Array, "B T N E"]
    own_logits: Float[Array, "B T H"]
    own_values: Float[Array, "B T H E"]
    ends: ChunkEnds
    first: Int[Array, " B"] | None
    documents: Int[Array, "B T"] | None
    options: ChunkAttentionOptions

    @property
    def operands(self) -> dict[str, Array]:
        """By name what a kernel multiplies: it has to compute in their dtypes."""
        return {
            "q": self.q,
            "own_values": self.own_values,
            "ends.keys": self.ends.keys,
            "ends.values": self.ends.values,
        }

    def with_gradients(
        self, dq: Array, d_own_logits: Array, d_own_values: Array, *d_ends: Array
    ) -> "ChunkAttentionCall":
        """Returns the call with gradients in place of its arrays.

        Args:
          d_ends: gradients of the ends' keys and values.
        """
        return ChunkAttentionCall(
            dq, d_own_logits, d_own_values, ChunkEnds(*d_ends), None, None, self.options
        )


def at_least_one(ends: ChunkEnds) -> ChunkEnds:
    """Gives a call without any chunk end one, of zeros: no position sees it.

    Kernels cannot read arrays without elements.
    """
    S = ends.keys.shape[2]
    if S:
        return ends
    padding = ((0, 0), (0, 0), (0, 1), (0, 0))
    known = ends.documents
    return ChunkEnds(
        keys=jnp.pad(ends.keys, padding),
        values=jnp.pad(ends.values, padding),
        documents=None if known is None else jnp.pad(known, ((0, 0), (0, 1))),
    )
