"""Rows of tokens to batches: grain data sets with exact, small, JSON-able state."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset
from jaxtyping import Int32, Int64

from recurjax.data.packing import BestFit, segment_numbers
from recurjax.data.shuffle import EndlessOrder
from recurjax.data.streams import Span, Split, TokenStream
from recurjax.types import IGNORED

Batch = dict[str, Int32[np.ndarray, "B T"]]
"""`ids`, `targets` (the next token, or IGNORED) and, when asked for, `segments`."""

PADDING_SEGMENT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The shape of a batch, and the part of it that this process delivers.

    Attributes:
      length: T, in tokens.
      batch: rows of the global batch, over all processes.
      rows: (first, after the last) of the rows wanted here.
      segments: whether batches carry document numbers.
    """

    length: int
    batch: int
    rows: tuple[int, int]
    segments: bool


def concatenated(
    split: Split, layout: Layout, *, seed: int, prefetch: int, threads: int
) -> grain.IterDataset[Batch]:
    """Endless batches of rows tokens[i*T : i*T+T+1], another permutation each epoch.

    Every row of the split comes once an epoch; a batch may hold the end of one epoch
    and the beginning of the next. Fewer than T tokens at the split's end are not used.
    """
    # T + 1 tokens make a row of T targets; the next row begins at the last of them.
    order = EndlessOrder((split.tokens - 1) // layout.length, seed)
    batches = _Batches(split, layout, order, count=sys.maxsize)
    return prefetched(batches, prefetch, threads)


def in_order(
    split: Split, layout: Layout, *, prefetch: int, threads: int
) -> grain.IterDataset[Batch]:
    """One pass over the split: every token but its first is the target of one place.

    The last row and the last batch are filled up with places whose target is IGNORED.
    """
    count = -(-(split.tokens - 1) // (layout.length * layout.batch))
    batches = _Batches(split, layout, lambda k: k, count=count)
    return prefetched(batches, prefetch, threads)


def best_fit(
    split: Split, layout: Layout, *, seed: int, buffer: int, prefetch: int
) -> grain.IterDataset[Batch]:
    """Endless batches of best-fit packed documents, shuffled anew each epoch."""
    lengths = split.document_lengths()
    order = EndlessOrder(len(lengths), seed)
    batches = PackedBatches(
        split, layout, lambda: BestFit(lengths, order, buffer=buffer)
    )
    return ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)


def best_fit_in_order(
    split: Split, layout: Layout, *, buffer: int, prefetch: int
) -> grain.IterDataset[Batch]:
    """One pass over the split's documents, packed as in training but not shuffled.

    What best fit crops is left out here too. The last row and the last batch are
    filled up with places whose target is IGNORED.
    """
    batches = PackedBatches(
        split, layout, lambda: _in_order_plan(split.document_lengths(), buffer)
    )
    return ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)


def count_best_fit_in_order(split: Split, layout: Layout, *, buffer: int) -> int:
    """Counts the batches of `best_fit_in_order`; plans all of its rows."""
    # Planning alone tells the count: which documents share a row depends on lengths.
    plan, rows = _in_order_plan(split.document_lengths(), buffer), 0
    while plan.row(layout.length + 1):
        rows += 1
    return -(-rows // layout.batch)


def _in_order_plan(lengths: Int64[np.ndarray, " N"], buffer: int) -> BestFit:
    return BestFit(lengths, lambda k: k, buffer=buffer, documents=len(lengths))


class PackedBatches(grain.IterDataset[Batch]):
    """The batches that a plan of rows yields, for documents of one split."""

    def __init__(self, split: Split, layout: Layout, plan: Callable[[], BestFit]):
        super().__init__()
        self._split, self._layout, self._plan = split, layout, plan

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return _PackedIterator(self._split, self._layout, self._plan())


class _PackedIterator(grain.DatasetIterator[Batch]):
    def __init__(self, split: Split, layout: Layout, plan: BestFit):
        super().__init__()
        self._stream, self._starts = split.stream, split.document_starts()
        self._layout, self._plan = layout, plan

    def __next__(self) -> Batch:
        capacity = self._layout.length + 1
        plans = [self._plan.row(capacity) for _ in range(self._layout.batch)]
        # An empty plan: the documents have come to their end before this batch.
        if not plans[0]:
            raise StopIteration
        # Every process plans all rows, so that all agree on which documents are used.
        wanted = plans[slice(*self._layout.rows)]
        rows, segments = packed_rows(self._stream, self._starts, wanted)
        return join_rows(rows, segments, self._layout)

    def get_state(self) -> dict[str, Any]:
        return self._plan.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._plan.set_state(state)


@runtime_checkable
class BatchSource(Protocol):
    """Batches by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


class _Batches:
    """Batch i holds rows order(i*batch) .. order(i*batch + batch - 1) of the split."""

    def __init__(
        self, split: Split, layout: Layout, order: Callable[[int], int], count: int
    ):
        self._split, self._layout = split, layout
        self._order, self._count = order, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        layout, first = self._layout, index * self._layout.batch
        rows = [self._order(first + r) for r in range(*layout.rows)]
        spans = [row_span(self._split, row, layout.length) for row in rows]
        tokens = self._split.stream.read(spans)
        starts, length = self._split.stream.starts, layout.length
        segments: Sequence[np.ndarray] = ()
        if layout.segments:
            segments = [segment_numbers(starts, begin, length) for begin, _ in spans]
        return join_rows(tokens, segments, layout)


class MadeRows:
    """Batches of rows that are made one by one, from their numbers.

    Batch i has the places i*batch .. i*batch + batch - 1; place n has row order(n).
    """

    def __init__(
        self,
        layout: Layout,
        *,
        order: Callable[[int], int],
        places: int | None,
        fill: Callable[[Batch, int, int], None],
    ):
        """Makes nothing yet.

        Args:
          layout: of each process' own rows, which alone it makes.
          order: from places to numbers of rows.
          places: of one pass; None: endless.
          fill: writes (batch, r, number), a row's tokens, into an empty row r.
        """
        self._layout, self._order = layout, order
        self._places, self._fill = places, fill

    def __len__(self) -> int:
        # Grain asks every source for a length; nobody comes to the end of this one.
        if self._places is None:
            return sys.maxsize
        return -(-self._places // self._layout.batch)

    def __getitem__(self, index: int) -> Batch:
        layout = self._layout
        first, stop = layout.rows
        shape = (stop - first, layout.length)
        batch = {
            "ids": np.zeros(shape, np.int32),
            "targets": np.full(shape, IGNORED, np.int32),
        }
        if layout.segments:
            batch["segments"] = np.full(shape, PADDING_SEGMENT, np.int32)
        for r in range(stop - first):
            place = index * layout.batch + first + r
            # The last batch of a pass keeps empty rows.
            if self._places is None or place < self._places:
                self._fill(batch, r, self._order(place))
        return batch


def row_span(split: Split, row: int, length: int) -> Span:
    """Returns the tokens of a concatenated row: T and the last one's target."""
    # Beyond the split's end rows are empty: the last batch of a pass in order.
    begin = min(split.start + row * length, split.stop)
    return begin, min(begin + length + 1, split.stop)


def packed_rows(
    stream: TokenStream,
    starts: Int64[np.ndarray, " N"],
    plans: Sequence[Sequence[tuple[int, int]]],
) -> tuple[list[Int32[np.ndarray, " _"]], list[Int32[np.ndarray, " _"]]]:
    """Reads rows that were planned as (document, how many of its first tokens).

    Returns:
      The tokens of each row, and the documents' numbers in it, one less.
    """
    pieces = [(int(starts[d]), n) for row in plans for d, n in row]
    parts = iter(stream.read([(start, start + n) for start, n in pieces]))
    none = np.zeros(0, np.int32)  # of a row after the documents' end
    rows = [np.concatenate([none, *(next(parts) for _ in row)]) for row in plans]
    return rows, [_repeated([n for _, n in row])[:-1] for row in plans]


def join_rows(
    rows: Sequence[np.ndarray], segments: Sequence[np.ndarray], layout: Layout
) -> Batch:
    """Lays rows of T+1 tokens, or fewer, out as a batch: ids and their targets.

    Args:
      segments: of each row's ids; not looked at where the layout has none.
    """
    shape = (len(rows), layout.length)
    batch = {"ids": np.zeros(shape, np.int32)}
    # What no row fills stays ignored.
    batch["targets"] = np.full(shape, IGNORED, np.int32)
    if layout.segments:
        batch["segments"] = np.full(shape, PADDING_SEGMENT, np.int32)
    for r, row in enumerate(rows):
        known = max(0, len(row) - 1)
        batch["ids"][r, :known] = row[:-1]
        batch["targets"][r, :known] = row[1:]
        if layout.segments:
            batch["segments"][r, :known] = segments[r][:known]
    return batch


def _repeated(counts: list[int]) -> Int32[np.ndarray, " T"]:
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def prefetched(
    batches: BatchSource, prefetch: int, threads: int
) -> grain.IterDataset[Batch]:
    """Makes batches ahead of time; their order is that of the source."""
    options = grain.ReadOptions(
        # 0 threads make each batch when it is asked for, in the caller's thread.
        num_threads=threads if prefetch else 0,
        prefetch_buffer_size=prefetch,
    )
    return grain.MapDataset.source(batches).to_iter_dataset(options)
