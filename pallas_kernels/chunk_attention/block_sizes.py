"""Block sizes of a call, and the class of calls that have the same best ones."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels import block_sizes
from pallas_kernels.block_sizes import GivenSizes
from pallas_kernels.chunk_attention.arrays import Array, ChunkEnds
from pallas_kernels.powers import next_power


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """How a backend's kernels cut a call; None: the backend chooses.

    Attributes:
      block_q: positions of one program. On a GPU those of the ends' gradient are apart.
      block_k: chunk ends that are read at once; on a GPU likewise.
      backward_block_q: positions that a program of the ends' gradient reads at once.
      backward_block_k: its chunk ends.
      splits: programs that share the heads of a query group in the queries' gradient.
      warps: of a program.
      stages: blocks of ends, or of positions, that are on their way at once.
    """

    block_q: int | None = None
    block_k: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None
    splits: int | None = None
    warps: int | None = None
    stages: int | None = None


def choose(
    backend: str,
    q: Array,
    own_logits: Array,
    ends: ChunkEnds,
    first: Array | None,
    documents: Array | None,
    *,
    chunk: int,
    blocks: BlockSizes | None,
) -> BlockSizes:
    """Returns the sizes that the caller gave, else measured ones.

    What is kept between the passes is laid out alike whatever they are.
    """
    shape = shape_class(q, own_logits, ends, first, documents, chunk=chunk)
    return block_sizes.choose(
        blocks, BlockSizes, op="chunk_attention", backend=backend, shape=shape
    )


def shape_class(
    q: Array,
    own_logits: Array,
    ends: ChunkEnds,
    first: Array | None,
    documents: Array | None,
    *,
    chunk: int,
) -> dict[str, Any]:
    """Returns what of a call its best block sizes depend on: one entry of the file.

    Batch, positions and ends stand for all that round up to the same power of two.
    """
    B, T, N, E = q.shape
    return {
        "batch": next_power(B),
        "positions": next_power(T),
        "ends": next_power(max(ends.keys.shape[2], 1)),
        "heads": own_logits.shape[2],
        "groups": N,
        "head_width": E,
        "chunk": chunk,
        "dtype": q.dtype.name,
        "cached": first is not None,
        "documents": documents is not None,
    }
