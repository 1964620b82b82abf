"""How the GPU kernels cut a call, in plain Python for jax and PyTorch alike."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.triton_launches import find_stretches

ENOUGH_WARPS = 6 * 132
"""On an H100, whose bandwidth they fill by two thirds: a row that is cut is read twice.
Not tuned on a device."""
FULL_WARPS = 16 * 132
"""What rows are cut for where there are fewer."""
SHORTEST_STRETCH = 64
"""Positions; shorter ones spend their time in summaries."""
MOST_TILES = 16
"""Tiles of a narrow stream that a program owns."""


class Sizes(NamedTuple):
    """How a pass is cut into programs of one warp.

    Attributes:
      channels: of each tile in a program, a power of two.
      unroll: positions whose inputs are read together.
      stretch: positions that a program walks.
    """

    channels: int
    unroll: int
    stretch: int


def find_sizes(
    B: int,
    T: int,
    D: int,
    W: int,
    *,
    backward: bool,
    head: int = 0,
    chunk: int | None = None,
    channels: int | None = None,
    unroll: int | None = None,
    stretch: int | None = None,
) -> Sizes:
    """Returns the sizes of a pass; the caller's replace the heuristic's.

    Args:
      W: the narrowest stream's width.
      head: E where queries are read in the kernel, whose channels are of one head.
      chunk: positions after which the state is reset; None: T.
    """
    divisor = math.gcd(head, W)  # the width without heads
    tiles = 1 << (D // W - 1).bit_length()
    # Of an array a program holds that many numbers at a time, or what it must. The
    # backward pass holds twice as many arrays.
    numbers = 256 if backward else 512
    channels = channels or min(divisor & -divisor, 64, max(16, numbers // tiles))
    chunk = min(chunk or T, T)
    stretches = find_stretches(
        chunk,
        D,
        B * -(-T // chunk) * max(1, W // channels),
        enough=ENOUGH_WARPS,
        full=FULL_WARPS,
        shortest=SHORTEST_STRETCH,
    )
    return Sizes(
        channels=channels,
        unroll=unroll or max(1, min(8, numbers // (tiles * channels))),
        stretch=min(stretch or -(-chunk // stretches), T),
    )


def refusal_of_widths(D: int, widths: Sequence[int]) -> str | None:
    """Returns why streams of these widths cannot be scanned under D gates, or None."""
    W = min(widths)
    if len(widths) > 2:
        return f"scans one or two streams, got {len(widths)}"
    if W % 16:
        return f"the narrowest width must be a multiple of 16, got {W}"
    between = [width for width in widths if width not in (W, D)]
    if between:
        return f"streams have {D} channels or one other width, got {W} and {between}"
    if D // W > MOST_TILES:
        return f"tiles a stream {MOST_TILES} times at most, got {D // W}"
    return None
