"""Grain's part of the data pipeline: reading ahead, and packing as an iterator.

Loaders import this module when they are iterated, so that configs need no grain.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset
from jaxtyping import Int32, Int64

from recurjax.data.batches import Batch, Layout, join_rows
from recurjax.data.packing import BestFit
from recurjax.data.shares import Shares
from recurjax.data.streams import Split, TokenStream


@runtime_checkable
class BatchSource(Protocol):
    """Batches by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


def read_ahead(
    batches: BatchSource, prefetch: int, threads: int
) -> grain.IterDataset[Batch]:
    """Reads batches ahead of time; their order is that of the source."""
    options = grain.ReadOptions(
        # 0 threads read each batch when the caller takes it, in the caller's thread.
        num_threads=threads if prefetch else 0,
        prefetch_buffer_size=prefetch,
    )
    return grain.MapDataset.source(batches).to_iter_dataset(options)


def packed(
    parts: Sequence[Split],
    layout: Layout,
    shares: Shares,
    plans: Callable[[], Sequence[BestFit]],
    prefetch: int,
) -> grain.IterDataset[Batch]:
    """Reads best-fit rows ahead of time in one thread, which advances the plans."""
    return ThreadPrefetchIterDataset(
        PackedBatches(parts, layout, shares, plans), prefetch_buffer_size=prefetch
    )


class PackedBatches(grain.IterDataset[Batch]):
    """Best-fit rows, each packed of one part's documents."""

    def __init__(
        self,
        parts: Sequence[Split],
        layout: Layout,
        shares: Shares,
        plans: Callable[[], Sequence[BestFit]],
    ):
        super().__init__()
        self._parts, self._layout, self._shares = parts, layout, shares
        self._plans = plans

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return _PackedIterator(self._parts, self._layout, self._shares, self._plans())


class _PackedIterator(grain.DatasetIterator[Batch]):
    def __init__(
        self,
        parts: Sequence[Split],
        layout: Layout,
        shares: Shares,
        plans: Sequence[BestFit],
    ):
        super().__init__()
        self._layout, self._shares, self._row = layout, shares, 0
        self._streams = [part.stream for part in parts]
        self._starts = [part.document_starts() for part in parts]
        self._plans = plans

    def __next__(self) -> Batch:
        capacity, (first, stop) = self._layout.length + 1, self._layout.rows
        none = np.zeros(0, np.int32)
        rows, segments = [none] * (stop - first), [none] * (stop - first)
        draws = self._shares.rows(self._row, self._row + self._layout.batch)
        for part, (_, places) in draws.items():
            # All rows are planned, so that all processes agree on which documents are
            # used, and only those of this one are read.
            plans = {r: self._plans[part].row(capacity) for r in places}
            if not any(plans.values()):  # a pass in order has come to its end
                raise StopIteration
            local = [r for r in places if first <= r < stop]
            read = _packed_rows(
                self._streams[part], self._starts[part], [plans[r] for r in local]
            )
            for r, tokens, numbers in zip(local, *read, strict=True):
                rows[r - first], segments[r - first] = tokens, numbers
        self._row += self._layout.batch
        return join_rows(rows, segments, self._layout)

    def get_state(self) -> dict[str, Any]:
        return {"row": self._row, "parts": [plan.get_state() for plan in self._plans]}

    def set_state(self, state: dict[str, Any]) -> None:
        # For a single corpus older versions saved only its plan, which has no row.
        self._row = int(state.get("row", 0))
        for plan, saved in zip(self._plans, state.get("parts", [state]), strict=True):
            plan.set_state(saved)


def _packed_rows(
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


def _repeated(counts: list[int]) -> Int32[np.ndarray, " T"]:
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)
