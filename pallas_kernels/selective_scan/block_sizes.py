"""Block sizes of a call, and the class of calls that have the same best ones."""

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import block_sizes
from pallas_kernels.block_sizes import GivenSizes
from pallas_kernels.powers import next_power

Array = jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """How a backend's kernels cut a call; None: the backend chooses.

    Attributes:
      channels: of one program. On a GPU those of the backward pass are apart.
      backward_channels: of its programs.
      unroll: positions in a turn of a kernel's or XLA's loop; on a GPU the forward
        pass's, whose inputs are read before the first of them is computed.
      backward_unroll: positions whose states are in registers at once on the way back.
      warps, backward_warps: of a program.
    """

    channels: int | None = None
    backward_channels: int | None = None
    unroll: int | None = None
    backward_unroll: int | None = None
    warps: int | None = None
    backward_warps: int | None = None


def choose(
    backend: str,
    u: Array,
    a: Array,
    starts: Array | None,
    *,
    chunk: int,
    blocks: BlockSizes | None,
) -> BlockSizes:
    """Returns the sizes that the caller gave, else measured ones.

    What is kept between the passes is laid out by `chunk` alone.
    """
    return block_sizes.choose(
        blocks,
        BlockSizes,
        op="selective_scan",
        backend=backend,
        shape=shape_class(u, a, starts, chunk=chunk),
    )


def shape_class(
    u: Array, a: Array, starts: Array | None, *, chunk: int
) -> dict[str, Any]:
    """Returns what of a call its best block sizes depend on: one entry of the file.

    Batch and positions stand for all that round up to the same power of two.
    """
    B, T, I = u.shape
    return {
        "batch": next_power(B),
        "positions": next_power(T),
        "channels": I,
        "states": a.shape[1],
        "chunk": chunk,
        "dtype": u.dtype.name,
        "starts": starts is not None,
    }


def refusal_of_unroll(name: str, unroll: int, chunk: int) -> str | None:
    """Returns why a kernel's loop over a chunk cannot have such turns, or None."""
    if chunk % unroll == 0:
        return None
    return f"{name} must divide chunk={chunk}, got {unroll}"
