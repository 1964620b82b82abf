"""How the GPU kernels cut a call, in plain Python for jax and PyTorch alike."""

from typing import NamedTuple

from pallas_kernels.triton_launches import find_stretches

WARP = 32
ENOUGH_WARPS = 2 * 132
"""Half of an H100's schedulers. A warp's 16 exponentials of a position do not wait for
each other, and stretches are computed twice: where there are more warps, no row is cut.
Not tuned on a device."""
FULL_WARPS = 8 * 132
"""What rows are cut for where there are fewer: two warps for each scheduler."""
SHORTEST_STRETCH = 256
"""Positions; shorter ones spend their time in summaries."""
LONGEST_CHUNK = 32
MOST_STATES = 32


class Sizes(NamedTuple):
    """The division of a pass into programs of one thread per channel.

    Attributes:
      channels: channels of a program, a power of two. Each backward program writes sums
        over its channels for b and c, and fewer programs write fewer of them.
      unroll: positions whose inputs are read together, or whose states the backward
        pass holds together.
      stretch: positions that a program walks, in full chunks.
    """

    channels: int
    unroll: int
    stretch: int


def find_sizes(
    B: int,
    T: int,
    I: int,
    chunk: int,
    *,
    backward: bool,
    channels: int | None = None,
    unroll: int | None = None,
    stretch: int | None = None,
) -> Sizes:
    """Returns the sizes of a pass; the caller's replace the heuristic's."""
    stretches = find_stretches(
        T,
        I,
        max(1, B * I // WARP),
        enough=ENOUGH_WARPS,
        full=FULL_WARPS,
        shortest=SHORTEST_STRETCH,
    )
    stretch = stretch or -(-T // stretches)
    return Sizes(
        channels=channels or min(I & -I, 2 * WARP if backward else WARP),
        unroll=unroll or min(chunk & -chunk, 2),
        stretch=-(-stretch // chunk) * chunk,
    )


def refusal_of_sizes(I: int, N: int) -> str | None:
    """Returns why the kernels cannot have these channels and states, or None."""
    if I % 16:
        return f"the channels must be a multiple of 16, got {I}"
    if N & (N - 1) or N > MOST_STATES:
        return f"a channel's states must be 1, 2, 4, 8, 16 or 32, got {N}"
    return None
