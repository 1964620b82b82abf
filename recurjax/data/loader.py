"""Batches of one split, and the position in them that a checkpoint saves.

Grain reads ahead and remembers the position. Which rows a batch holds is a function of
its number, or of a plan with a small state, so that a place is exact and small, and
serves any division of the rows among processes.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32, Real

from recurjax.data.batches import Batch, Layout, empty_batch, join_rows
from recurjax.data.config import DataConfig
from recurjax.data.packing import BestFit, segment_numbers
from recurjax.data.shares import Shares
from recurjax.data.shuffle import EndlessOrder, order_identity
from recurjax.data.streams import Split
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError

if TYPE_CHECKING:
    import grain


class RowsOfText:
    """The interface of data sets of text; a task's rows differ in each."""

    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    @property
    def token_bytes(self) -> Real[np.ndarray, " V"]:
        """The bytes of text that each token counts for in bits per byte."""
        return self.tokenizer.token_bytes

    def evaluation_length(self, length: int) -> int:
        """Returns the length of a row in evaluations: as in training."""
        return length

    def labels(self, split: str, *, batch: int) -> None:
        """Returns None: rows of text have neither slices nor a floor."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batches of tokens from the splits of one corpus or of a mixture's parts.

    Shuffled batches are endless: each part's rows (with best fit, its documents) come
    once an epoch, in another order each, and a batch may straddle two epochs. A pass in
    order has one part, and fills its last batch up with targets that are IGNORED.
    Concatenated, row i of a split is tokens i*T .. i*T+T, and fewer than T tokens at
    the end are not trained on; best fit leaves out what it crops.

    Attributes:
      parts: the splits drawn from.
      weights: weights of the parts, from each of these steps on; the first is step 0.
      config: how rows are packed, and how far ahead batches are read.
      layout: the shape of a batch and this process' rows of it.
      in_order: one pass in order, not endless and shuffled.
      seed: seed of the shuffle.
      fingerprint: fingerprint of the data, to refuse a place in other data.
    """

    parts: tuple[Split, ...]
    weights: tuple[tuple[int, tuple[float, ...]], ...] = ((0, (1.0,)),)
    config: DataConfig
    layout: Layout
    in_order: bool
    seed: int
    fingerprint: str

    def __iter__(self) -> "Batches":
        return Batches(iter(self._pipeline), self._identity)

    @property
    def batches(self) -> int | None:
        """Batches in the pass; None: endless."""
        if not self.in_order:
            return None
        [part] = self.parts
        if self.config.packing == "concat":
            # Every token but the first is a target once.
            return -(-(part.tokens - 1) // (self.layout.length * self.layout.batch))
        # Which documents share a row depends on their lengths: all rows are planned.
        [plan], rows = self._plans(), 0
        while plan.row(self.layout.length + 1):
            rows += 1
        return -(-rows // self.layout.batch)

    @cached_property
    def _pipeline(self) -> "grain.IterDataset[Batch]":
        from recurjax.data import pipeline  # needs grain

        rows = [(step * self.layout.batch, weights) for step, weights in self.weights]
        shares, config = Shares(rows), self.config
        if config.packing == "best_fit":
            return pipeline.packed(
                self.parts, self.layout, shares, self._plans, config.prefetch
            )
        batches = _ConcatenatedBatches(
            self.parts,
            self.layout,
            shares,
            orders=[self._order(count) for count in self._counts],
            count=self.batches,
        )
        return pipeline.read_ahead(batches, config.prefetch, config.threads)

    def _plans(self) -> list[BestFit]:
        """Returns a plan for each part: its buffer of documents has its own place."""
        return [
            BestFit(
                part.document_lengths(),
                self._order(count),
                buffer=self.config.packing_buffer,
                documents=count if self.in_order else None,
            )
            for part, count in zip(self.parts, self._counts, strict=True)
        ]

    def _order(self, count: int) -> Callable[[int], int]:
        return (lambda k: k) if self.in_order else EndlessOrder(count, self.seed)

    @cached_property
    def _counts(self) -> list[int]:
        """Counts what is shuffled in each part: documents for best fit, else rows."""
        if self.config.packing == "best_fit":
            return [len(part.document_starts()) for part in self.parts]
        # T + 1 tokens make a row of T targets; the next begins at the last of them.
        return [(part.tokens - 1) // self.layout.length for part in self.parts]

    @cached_property
    def _identity(self) -> dict[str, Any]:
        # Threads and prefetch change when a batch is read, not what it holds.
        return {
            **_identity(
                self.layout,
                data=self.fingerprint,
                split=self.parts[0].name,
                in_order=self.in_order,
                seed=self.seed,
                counts=self._counts,
            ),
            "packing": self.config.packing,
            "packing_buffer": self.config.packing_buffer,
        }


@dataclass(frozen=True, kw_only=True)
class RowLoader:
    """Batches of rows that are written one by one, from their numbers.

    Shuffled batches are endless, a pass in order fills its last batch up with rows that
    ask nothing.

    Attributes:
      fill: writes (batch, r, number), a row's tokens, into an empty row r.
      count: rows of the split; None: endless new rows, row n at place n.
      layout, in_order, seed, fingerprint: as a `Loader`'s.
      split: the name of the part drawn from.
      prefetch: batches read ahead.
      threads: threads that read them.
      order: place -> number, for shuffled batches; None: all rows of a split in another
        order each epoch.
      row_length: number -> tokens of that row: a batch is then as long as its first
        row and not as `layout`. None: all batches are alike.
    """

    fill: Callable[[Batch, int, int], None]
    count: int | None
    layout: Layout
    in_order: bool
    seed: int
    fingerprint: str
    split: str
    prefetch: int
    threads: int
    order: Callable[[int], int] | None = None
    row_length: Callable[[int], int] | None = None

    def __iter__(self) -> "Batches":
        from recurjax.data import pipeline  # needs grain

        order: Callable[[int], int] = lambda k: k  # noqa: E731
        # Endless new rows need no order. A fixed set has another one in each epoch.
        if self.count is not None and not self.in_order:
            order = self.order or EndlessOrder(self.count, self.seed)
        batches = _FilledBatches(
            self.layout,
            order=order,
            places=self.count if self.in_order else None,
            fill=self.fill,
            row_length=self.row_length,
        )
        ahead = pipeline.read_ahead(batches, self.prefetch, self.threads)
        identity = _identity(
            self.layout,
            data=self.fingerprint,
            split=self.split,
            in_order=self.in_order,
            seed=self.seed,
            counts=[] if self.count is None else [self.count],
        )
        return Batches(iter(ahead), identity)

    @property
    def batches(self) -> int | None:
        """Batches in the pass; None: endless."""
        if self.count is None or not self.in_order:
            return None
        return -(-self.count // self.layout.batch)


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


class Batches:
    """An iterator of batches whose state is small, exact and JSON-able."""

    def __init__(self, iterator: Any, identity: dict[str, Any]):
        """Wraps a grain.DatasetIterator of batches."""
        self._iterator, self._identity = iterator, identity

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch delivered, as JSON allows."""
        position = _plain(self._iterator.get_state())
        return {"loader": self._identity, "position": position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved position, on any division of the rows.

        Raises:
          UserError: it was saved with other data, batch, length, seed or packing, or
            by a version that shuffled otherwise.
        """
        saved = state["loader"]
        if "shuffle" in self._identity and "shuffle" not in saved:
            raise UserError(
                "the checkpoint's position in the data is from an older recurjax, "
                "which shuffled rows in another order: resume with that version "
                "or start a new run"
            )
        for name, value in self._identity.items():
            # Compared by the saved value: a field that is missing there differs too.
            if saved.get(name) != value:
                raise UserError(
                    f"the checkpoint's position in the data was saved with {name} "
                    f"{saved.get(name)}, the config has {value}: restore that setting "
                    "or start a new run"
                )
        self._iterator.set_state(state["position"])

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._iterator.close()


class CarriedBatches:
    """Batches of long rows in pieces: row r of a step continues row r of the last one.

    A row begins at every `pieces`-th step. Row r does so r steps before row 0, so that
    each step has pieces from everywhere in the long rows, and its loss is like the
    others': at step s, row r begins a long row where (s + r) mod pieces = 0. The first
    rows therefore begin in their middle.
    """

    def __init__(self, batches: Batches, pieces: int, *, first: int = 0):
        """Reads nothing yet.

        Args:
          batches: the long rows; `pieces` divides their length.
          pieces: pieces of a long row.
          first: number in the global batch of the first row that this process delivers.
        """
        self._batches, self._pieces, self._first = batches, pieces, first
        # The batch that row 0 is in, and the next, each with the place before it.
        self._open: list[tuple[dict[str, Any], Batch]] = []
        self._step = 0  # since the first of them was opened

    def __iter__(self) -> "CarriedBatches":
        return self

    def __next__(self) -> Batch:
        while len(self._open) < 2:
            self._open.append((self._batches.get_state(), next(self._batches)))
        (_, current), (_, following) = self._open
        batch = {name: self._cut(current[name], following[name]) for name in current}
        self._step += 1
        if self._step == self._pieces:
            self._step = 0
            del self._open[0]
        return batch

    def _cut(
        self, current: Int32[np.ndarray, "B S"], following: Int32[np.ndarray, "B S"]
    ) -> Int32[np.ndarray, "B T"]:
        rows, pieces = np.arange(len(current)), self._pieces
        both = np.concatenate([current, following], axis=1)
        at = self._step + (self._first + rows) % pieces
        return both.reshape(len(rows), 2 * pieces, -1)[rows, at]

    def get_state(self) -> dict[str, Any]:
        """Returns the place of row 0's long row, and its next piece."""
        place = self._open[0][0] if self._open else self._batches.get_state()
        return {"rows": place, "piece": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved place; errors are those of `Batches.set_state`."""
        self._batches.set_state(state["rows"])
        self._open, self._step = [], int(state["piece"])

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._batches.close()


class _Chain:
    """Batches of several loaders in turn, with a place that can be saved."""

    def __init__(self, loaders: Iterable[Loader]):
        self._loaders, self._at = list(loaders), 0
        self._current = iter(self._loaders[0])

    def __iter__(self) -> "_Chain":
        return self

    def __next__(self) -> Batch:
        while True:
            try:
                return next(self._current)
            except StopIteration:
                # The last loader's end is the chain's; before it the next one begins.
                if self._at + 1 == len(self._loaders):
                    raise
            self._enter(self._at + 1)

    def get_state(self) -> dict[str, Any]:
        """Returns the part, and the position in it after the last batch delivered."""
        return {"part": self._at, "position": self._current.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved position."""
        self._enter(int(state["part"]))
        self._current.set_state(state["position"])

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._current.close()

    def _enter(self, part: int) -> None:
        self._current.close()
        # A part's threads are started when its turn comes, and closed before the next.
        self._at, self._current = part, iter(self._loaders[part])


class _ConcatenatedBatches:
    """Batch i holds rows i*batch .. of the parts' streams, in the parts' shares."""

    def __init__(
        self,
        parts: Sequence[Split],
        layout: Layout,
        shares: Shares,
        *,
        orders: Sequence[Callable[[int], int]],
        count: int | None,
    ):
        self._parts, self._layout, self._shares = parts, layout, shares
        self._orders, self._count = orders, count

    def __len__(self) -> int:
        # Grain asks every source for a length; nobody comes to the end of these.
        return sys.maxsize if self._count is None else self._count

    def __getitem__(self, index: int) -> Batch:
        layout, length = self._layout, self._layout.length
        first, stop = (index * layout.batch + r for r in layout.rows)
        rows = [np.zeros(0, np.int32)] * (stop - first)
        segments = rows.copy() if layout.segments else []
        # A part's rows in a batch are neighbours among its own: its stream is read once
        # for all.
        for part, (number, places) in self._shares.rows(first, stop).items():
            split, order = self._parts[part], self._orders[part]
            spans = [
                _row_span(split, order(number + n), length) for n in range(len(places))
            ]
            for r, tokens in zip(places, split.stream.read(spans), strict=True):
                rows[r] = tokens
            if layout.segments:
                starts = split.stream.starts
                for r, (begin, _) in zip(places, spans, strict=True):
                    segments[r] = segment_numbers(starts, begin, length)
        return join_rows(rows, segments, layout)


class _FilledBatches:
    """Batches of rows that are written one by one, from their numbers.

    Batch i has the places i*batch .. i*batch + batch - 1; place n has row order(n).
    """

    def __init__(
        self,
        layout: Layout,
        *,
        order: Callable[[int], int],
        places: int | None,
        fill: Callable[[Batch, int, int], None],
        row_length: Callable[[int], int] | None,
    ):
        self._layout, self._order = layout, order
        self._places, self._fill = places, fill
        self._row_length = row_length

    def __len__(self) -> int:
        if self._places is None:
            return sys.maxsize
        return -(-self._places // self._layout.batch)

    def __getitem__(self, index: int) -> Batch:
        layout = self._layout
        if self._row_length is not None:
            length = self._row_length(self._order(index * layout.batch))
            layout = replace(layout, length=length)
        batch = empty_batch(layout)
        first, stop = layout.rows
        for r in range(stop - first):
            place = index * layout.batch + first + r
            # The last batch of a pass keeps empty rows.
            if self._places is None or place < self._places:
                self._fill(batch, r, self._order(place))
        return batch


def _row_span(split: Split, row: int, length: int) -> tuple[int, int]:
    """Returns the tokens of a concatenated row: T and the last one's target."""
    # The last batch of a pass in order may end after the split: those rows are empty.
    begin = min(split.start + row * length, split.stop)
    return begin, min(begin + length + 1, split.stop)


def _identity(
    layout: Layout,
    *,
    data: str,
    split: str,
    in_order: bool,
    seed: int,
    counts: Sequence[int],
) -> dict[str, Any]:
    """Returns all that the meaning of a position depends on, but the processes.

    Args:
      counts: number of items in each order that is shuffled.
    """
    return {
        "data": data,
        "split": split,
        "in_order": in_order,
        "seed": seed,
        "length": layout.length,
        "batch": layout.batch,
        **({} if in_order else order_identity(*counts)),
    }


def _plain(state: Any) -> Any:
    """Returns a state with lists in the place of arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray) else state
