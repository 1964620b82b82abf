"""Block sizes of a call, and the class of calls that have the same best ones."""

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import block_sizes
from pallas_kernels.block_sizes import GivenSizes
from pallas_kernels.gated_scan.inputs import Gate, GateLogits, array_of, narrowest
from pallas_kernels.gated_scan.queries import head_of
from pallas_kernels.powers import next_power

Array = jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """How a backend's kernels cut a call; None: the backend chooses.

    Attributes:
      stretch: positions of a stretch. Where it is the chunk, stretches are not linked;
        else the state is reset within them.
      channels: of one tile in one program.
      unroll: positions whose inputs are read before the first of them is computed.
      warps: of a program.
    """

    stretch: int | None = None
    channels: int | None = None
    unroll: int | None = None
    warps: int | None = None


def choose(
    backend: str,
    gate: Gate,
    values: tuple[Array, ...],
    starts: Array | None,
    lengths: Array | None,
    queries: Array | None,
    *,
    chunk: int | None,
    blocks: BlockSizes | None,
) -> BlockSizes:
    """Returns the sizes that the caller gave, else measured ones.

    What is kept between the passes, all states, is laid out alike whatever they are.
    """
    shape = shape_class(gate, values, starts, lengths, queries, chunk=chunk)
    return block_sizes.choose(
        blocks, BlockSizes, op="gated_scan", backend=backend, shape=shape
    )


def linked(stretch: int, length: int, chunk: int | None) -> bool:
    """Returns whether the state flows from one stretch of T positions into the next."""
    return chunk is None or chunk >= length or stretch != chunk


def shape_class(
    gate: Gate,
    values: tuple[Array, ...],
    starts: Array | None,
    lengths: Array | None,
    queries: Array | None,
    *,
    chunk: int | None,
) -> dict[str, Any]:
    """Returns what of a call its best block sizes depend on: one entry of the file.

    Batch and positions stand for all that round up to the same power of two. A chunk of
    all positions is none.
    """
    B, T, D = gate.shape
    return {
        "batch": next_power(B),
        "positions": next_power(T),
        "width": D,
        "streams": len(values),
        "narrowest": narrowest(values),
        "head_width": head_of(queries),
        "chunk": None if chunk is None or chunk >= T else chunk,
        "dtype": values[0].dtype.name,
        "gate_dtype": array_of(gate).dtype.name,
        "logits": isinstance(gate, GateLogits),
        "starts": starts is not None,
        "lengths": lengths is not None,
    }
