"""Several corpora as one data set: rows of each in the shares that a config says."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from recurjax.data.config import Mixture
from recurjax.data.loader import Batches, Loader
from recurjax.data.packing import BestFit, segment_numbers
from recurjax.data.pipeline import (
    Batch,
    Layout,
    join_rows,
    packed_rows,
    prefetched,
    row_span,
)
from recurjax.data.shares import Shares
from recurjax.data.shuffle import EndlessOrder, order_identity


@dataclass(frozen=True, kw_only=True)
class ChainedLoader:
    """All batches of one part after the other; `parts` are their loaders."""

    parts: Mapping[str, Loader]

    def __iter__(self) -> "_Chain":
        return _Chain(self.parts.values())

    @property
    def batches(self) -> int | None:
        """Batches in the pass."""
        counts = [part.batches for part in self.parts.values()]
        # Endless parts make an endless chain.
        return None if None in counts else sum(c for c in counts if c is not None)


class _Chain:
    """Batches of several loaders in turn, with a place that can be saved."""

    def __init__(self, loaders: Iterable[Loader]):
        self._loaders, self._at = list(loaders), 0
        self._now = iter(self._loaders[0])

    def __iter__(self) -> "_Chain":
        return self

    def __next__(self) -> Batch:
        while True:
            try:
                return next(self._now)
            except StopIteration:
                # The last loader's end is the chain's; before it the next one begins.
                if self._at + 1 == len(self._loaders):
                    raise
            self._enter(self._at + 1)

    def get_state(self) -> dict[str, Any]:
        """Returns the part, and the position in it after the last batch delivered."""
        return {"part": self._at, "position": self._now.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved position."""
        self._enter(int(state["part"]))
        self._now.set_state(state["position"])

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._now.close()

    def _enter(self, part: int) -> None:
        self._now.close()
        # A part's threads are started when its turn comes, and closed before the next.
        self._at, self._now = part, iter(self._loaders[part])


@dataclass(frozen=True, kw_only=True)
class MixtureLoader:
    """Endless shuffled batches in shares; each `iter` begins anew.

    Attributes:
      mixture: the weights, and when they change.
      parts: the loaders of the parts, whose rows are drawn.
      fingerprint: of the data, to refuse a place in other data.
    """

    mixture: Mixture
    parts: tuple[Loader, ...]
    fingerprint: str

    @property
    def batches(self) -> None:
        """Returns None: endless."""

    def __iter__(self) -> Batches:
        return Batches(iter(self._pipeline), self._identity)

    @cached_property
    def _pipeline(self) -> grain.IterDataset[Batch]:
        config, layout = self.parts[0].config, self.parts[0].layout
        weights = tuple(part.weight for part in self.mixture.parts)
        # Changes are told in steps; rows are what shares count.
        later = [(c.step * layout.batch, c.weights) for c in self.mixture.reweightings]
        shares = Shares([(0, weights), *later])
        if config.packing == "best_fit":
            made = _PackedMixture(self.parts, layout, shares)
            return ThreadPrefetchIterDataset(made, prefetch_buffer_size=config.prefetch)
        batches = _MixedBatches(self.parts, layout, shares)
        return prefetched(batches, config.prefetch, config.threads)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        # All parts have the mixture's layout, seed and packing.
        # What a part's place depends on is alike for all but the data.
        order = order_identity(*(part.order_count for part in self.parts))
        return {**self.parts[0].identity, **order, "data": self.fingerprint}


class _MixedBatches:
    """Batch i holds rows i*batch .. of the mixture, cut out of the parts' streams."""

    def __init__(self, parts: tuple[Loader, ...], layout: Layout, shares: Shares):
        self._layout, self._shares = layout, shares
        self._splits = [loader.part for loader in parts]
        self._orders = [
            EndlessOrder((loader.part.tokens - 1) // layout.length, loader.seed)
            for loader in parts
        ]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        layout, length = self._layout, self._layout.length
        first, stop = (index * layout.batch + r for r in layout.rows)
        rows = [np.zeros(0, np.int32)] * (stop - first)
        segments = rows.copy() if layout.segments else []
        # A part's rows in a batch are neighbours among its own: its order is asked and
        # its stream is read once for all.
        for part, (number, places) in self._shares.rows(first, stop).items():
            split, own = self._splits[part], self._orders[part]
            numbers = [own(number + n) for n in range(len(places))]
            spans = [row_span(split, row, length) for row in numbers]
            for r, tokens in zip(places, split.stream.read(spans), strict=True):
                rows[r] = tokens
            if layout.segments:
                starts = split.stream.starts
                for r, (begin, _) in zip(places, spans, strict=True):
                    segments[r] = segment_numbers(starts, begin, length)
        return join_rows(rows, segments, layout)


class _PackedMixture(grain.IterDataset[Batch]):
    """Best-fit rows, each packed of one part's documents."""

    def __init__(self, parts: tuple[Loader, ...], layout: Layout, shares: Shares):
        super().__init__()
        self._parts, self._layout, self._shares = parts, layout, shares

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return _PackedIterator(self._parts, self._layout, self._shares)


class _PackedIterator(grain.DatasetIterator[Batch]):
    def __init__(self, parts: tuple[Loader, ...], layout: Layout, shares: Shares):
        super().__init__()
        self._layout, self._shares, self._row = layout, shares, 0
        self._splits = [loader.part for loader in parts]
        self._starts = [split.document_starts() for split in self._splits]
        self._plans = [_plan(loader) for loader in parts]

    # A plan for each part: its buffer of documents has its own place.
    def __next__(self) -> Batch:
        capacity, (first, stop) = self._layout.length + 1, self._layout.rows
        none = np.zeros(0, np.int32)
        rows, segments = [none] * (stop - first), [none] * (stop - first)
        drawn = self._shares.rows(self._row, self._row + self._layout.batch)
        for part, (_, places) in drawn.items():
            # All rows are planned, on every process, and only its own are read.
            plans = {r: self._plans[part].row(capacity) for r in places}
            mine = [r for r in places if first <= r < stop]
            stream, starts = self._splits[part].stream, self._starts[part]
            read = packed_rows(stream, starts, [plans[r] for r in mine])
            for r, tokens, numbers in zip(mine, *read, strict=True):
                rows[r - first], segments[r - first] = tokens, numbers
        self._row += self._layout.batch
        return join_rows(rows, segments, self._layout)

    def get_state(self) -> dict[str, Any]:
        return {"row": self._row, "parts": [plan.get_state() for plan in self._plans]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._row = int(state["row"])
        for plan, saved in zip(self._plans, state["parts"], strict=True):
            plan.set_state(saved)


def _plan(loader: Loader) -> BestFit:
    lengths = loader.part.document_lengths()
    order = EndlessOrder(len(lengths), loader.seed)
    return BestFit(lengths, order, buffer=loader.config.packing_buffer)
