"""How the persistent kernel is cut: its programs' parts, and their shared memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from pallas_kernels.recurrent_prefill.arrays import LayerSpec

SIDE = 64
"""Rows and columns of what is computed at once: an accumulator, a block of a ring."""
RING = 4
"""Blocks of activations that are on their way to a program or being read."""
_BLOCK_BYTES = 2 * SIDE * SIDE
# Memory barriers, what sums over a row pass between warps, and alignment.
_COMPILER_S_BYTES = 3072
_LEAST_COLUMNS = 8


class LayerWidths(NamedTuple):
    """D, H E and F of a layer."""

    model: int
    heads: int
    inner: int


class Share(NamedTuple):
    """What one program has of a product: 64 columns are `splits` programs' together.

    Attributes:
      splits: programs that own the same columns, each its part of the contracted axis.
      depth: rows of the weight in that part.
      columns: those of the 64 that the program adds up over all parts and finishes.
    """

    splits: int
    depth: int
    columns: int


class Shares(NamedTuple):
    """Of the layer's products."""

    out: Share
    up: Share
    down: Share
    pair: Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a call's kernels have in common.

    Attributes:
      shares: what each of `programs` programs has of each product.
      played: programs that one instance of the grid plays one after the other: one on
        a device; all of them in the interpreter, which runs a grid's instances one
        after the other and has no semaphores.
      interpret: False, or the interpreter's parameters.
    """

    spec: LayerSpec
    programs: int
    shares: Shares
    played: int = 1
    interpret: Any = False

    @property
    def instances(self) -> int:
        """The size of the grid."""
        return self.programs // self.played


def share_out(widths: LayerWidths, programs: int) -> Shares | None:
    """Returns what each program has of each product, None where they do not divide."""
    D, HE, F = widths
    shapes = {"out": (HE, D), "up": (D, F), "down": (F, D), "pair": (D, 2 * HE)}
    shares = {}
    for name, (N, M) in shapes.items():
        groups = M // SIDE
        splits = programs // groups if groups else 0
        if not splits or programs % groups or M % SIDE or N % (splits * SIDE):
            return None
        if SIDE % splits or SIDE // splits < _LEAST_COLUMNS:
            return None
        shares[name] = Share(splits, N // splits, SIDE // splits)
    return Shares(**shares)


def shared_bytes(shares: Shares) -> int:
    """Returns what a program of 16-bit weights takes of shared memory."""
    weights = sum(2 * share.depth * SIDE for share in shares)
    finished = sum(2 * SIDE * share.columns for share in shares)
    return weights + (RING + 1) * _BLOCK_BYTES + finished + _COMPILER_S_BYTES


def choose_programs(widths: LayerWidths, *, most: int, shared: int) -> int | None:
    """Returns the most programs, up to `most`, whose parts fit `shared` bytes."""
    for programs in range(most, 0, -1):
        shares = share_out(widths, programs)
        if shares is not None and shared_bytes(shares) <= shared:
            return programs
    return None


def refusal_of_widths(widths: LayerWidths, *, most: int, shared: int) -> str | None:
    """Returns why a layer cannot be held by `most` programs at once, None if it can."""
    if choose_programs(widths, most=most, shared=shared) is not None:
        return None
    D, HE, F = widths
    return (
        f"finds no cut of D={D}, heads * head_width={HE}, F={F} into at most {most} "
        f"programs whose weights fit {shared} bytes each"
    )
