"""Plans which documents, by number and position, make up each row of T+1 tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Shaped

REFILL = 128
"""Documents that join the buffer at a time, as in nanochat's loader."""


class BestFit:
    """Packs complete documents into rows, each time the largest that still fits.

    When none of the buffer fits, the shortest is cropped to fill the row and its rest
    is dropped. Ties go to the document that has waited longest. So each row begins a
    document, and no row is padded but the one at which the documents end. Source:
    nanochat's loader "BOS-aligned best-fit".

    Only lengths are looked at: which tokens a row holds can be planned on every
    process, and read on the one that needs them.
    """

    def __init__(
        self,
        lengths: Int64[np.ndarray, " N"],
        order: Callable[[int], int],
        *,
        buffer: int,
        refill: int = REFILL,
        documents: int | None = None,
    ):
        """Begins at the first document of the order.

        Args:
          lengths: lengths of each document, in tokens, BOS included; at least 1.
          order: the document that comes k-th, for any k >= 0.
          buffer: documents to choose from, at least, as long as some are to come.
          refill: how many join at a time when there are fewer.
          documents: how many come; None: without end.
        """
        self._lengths_of, self._order = lengths, order
        self._least, self._refill, self._count = buffer, refill, documents
        self._next = 0
        self._documents = np.zeros(0, np.int64)  # those waiting, longest-waiting first
        self._lengths = np.zeros(0, np.int64)

    def row(self, capacity: int) -> list[tuple[int, int]]:
        """Returns the next row: (document, how many of its first tokens) in order.

        It holds fewer tokens than `capacity` only where the documents have come to
        their end, and none after that.
        """
        row, space = [], capacity
        while space > 0:
            self._fill()
            if not len(self._documents):
                break
            # Documents that do not fit count 0; argmax takes the first of the largest,
            # the one that has waited longest.
            fitting = np.where(self._lengths <= space, self._lengths, 0)
            best = int(fitting.argmax())
            # None fits: the shortest loses least when it is cropped.
            if fitting[best] == 0:
                best = int(self._lengths.argmin())
            take = min(int(self._lengths[best]), space)
            row.append((int(self._documents[best]), take))
            # A document's cropped rest is never used: every row starts with BOS.
            space -= take
            self._documents = np.delete(self._documents, best)
            self._lengths = np.delete(self._lengths, best)
        return row

    def get_state(self) -> dict[str, Any]:
        """Returns the place in the order and the waiting documents, as an array.

        `Batches.get_state` makes JSON of it. Nobody may write into it.
        """
        return _Unchanging(next=self._next, buffer=self._documents)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `get_state` was called, exactly."""
        self._next = int(state["next"])
        self._documents = np.array(state["buffer"], np.int64)
        # Only numbers are saved; lengths follow from them.
        self._lengths = self._lengths_of[self._documents]

    def _fill(self) -> None:
        while len(self._documents) < self._least:
            ks = range(self._next, self._next + self._refill)
            if self._count is not None:
                ks = ks[: max(0, self._count - self._next)]
            if not ks:
                return
            # Refill in one go: single documents would look up the order one by one.
            new = np.array([self._order(k) for k in ks], np.int64)
            self._next += len(ks)
            self._documents = np.concatenate([self._documents, new])
            self._lengths = self._lengths_of[self._documents]


class _Unchanging(dict[str, Any]):
    """A state that needs no copy.

    Grain copies the state after every batch, number by number: of a thousand waiting
    documents that took four times as long as the batch.
    """

    def __deepcopy__(self, memo: object) -> "_Unchanging":
        return self


def without_middle(
    ids: Shaped[np.ndarray, " T"], most: int, *, first: int | None = None
) -> Shaped[np.ndarray, " _"]:
    """Returns at most `most` tokens: the first ones and the last ones.

    Source: LongBench's truncation of prompts, which RAT takes over.

    Args:
      ids: token ids of a text, or a figure of each.
      most: how many may stay.
      first: how many of them stand at the beginning; None: half of them.
    """
    if len(ids) <= most:
        return ids
    first = most // 2 if first is None else min(first, most)
    return np.concatenate([ids[:first], ids[len(ids) - (most - first) :]])


def segment_numbers(
    starts: Int64[np.ndarray, " N"], begin: int, length: int
) -> Int32[np.ndarray, " T"]:
    """Numbers the documents of the tokens begin .. begin+length-1 from 0.

    Args:
      starts: where each document of the stream begins, ascending.
      begin: the first token.
      length: T, in tokens.
    """
    # A document that begins at the first token is number 0 without a boundary.
    first, last = np.searchsorted(starts, [begin + 1, begin + length])
    boundary = np.zeros(length, np.int32)
    boundary[starts[first:last] - begin] = 1
    return np.cumsum(boundary, dtype=np.int32)
