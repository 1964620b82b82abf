"""What the scans' kernels in Triton's language share. Neither jax nor torch is here.

A program owns a row of [B, T, ...], a stretch of LENGTH positions and CHANNELS
channels of a line of W. Arrays are addressed as lines: [end, W] from the stretch's
first position on, `end` of which are the program's own.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)): exactly 1 of infinity."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def find_place(T, LENGTH, W: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns (row, stretch, first channel, first line of [B T, W], own lines)."""
    # Programs of neighbouring channels run together and share lines of memory.
    COLUMNS: tl.constexpr = W // CHANNELS
    pid = tl.program_id(0)
    stretches = tl.cdiv(T, LENGTH)
    row = (pid // COLUMNS // stretches).to(tl.int64)
    stretch = pid // COLUMNS % stretches
    first = stretch * LENGTH
    column = pid % COLUMNS * CHANNELS
    return row, stretch, column, row * T + first, tl.minimum(LENGTH, T - first)


@triton.jit
def read(ref, t, end, W: tl.constexpr, j, other: tl.constexpr = 0.0):
    """Returns columns j of line t of an array [end, W] in float32; past it `other`."""
    at = t * W + j
    return tl.load(ref + at, mask=at < end * W, other=other).to(tl.float32)


@triton.jit
def write(ref, t, end, W: tl.constexpr, j, x):
    """Writes columns j of line t of an array [end, W], nothing past it."""
    at = t * W + j
    tl.store(ref + at, x.to(ref.dtype.element_ty), mask=at < end * W)
