"""Batches of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from recurjax.types import IGNORED

Batch = dict[str, Int32[np.ndarray, "B T"]]
"""`ids`, `targets` (the next token, or IGNORED) and `segments` (document numbers)."""

PADDING_SEGMENT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The shape of a batch, and the part of it that this process delivers.

    Attributes:
      length: T, in tokens.
      batch: rows of the global batch, over all processes.
      rows: (first, after the last) of the rows that this process delivers.
      segments: whether batches carry document numbers.
    """

    length: int
    batch: int
    rows: tuple[int, int]
    segments: bool


def empty_batch(layout: Layout) -> Batch:
    """Returns this process' rows without tokens: what no row fills stays ignored."""
    first, stop = layout.rows
    shape = (stop - first, layout.length)
    batch = {
        "ids": np.zeros(shape, np.int32),
        "targets": np.full(shape, IGNORED, np.int32),
    }
    if layout.segments:
        batch["segments"] = np.full(shape, PADDING_SEGMENT, np.int32)
    return batch


def join_rows(
    rows: Sequence[np.ndarray], segments: Sequence[np.ndarray], layout: Layout
) -> Batch:
    """Lays rows of T+1 tokens, or fewer, out as a batch: ids and their targets.

    Args:
      segments: segments of each row's ids; ignored if the layout has none.
    """
    batch = empty_batch(layout)
    for r, row in enumerate(rows):
        length = max(0, len(row) - 1)
        batch["ids"][r, :length] = row[:-1]
        batch["targets"][r, :length] = row[1:]
        if layout.segments:
            batch["segments"][r, :length] = segments[r][:length]
    return batch
