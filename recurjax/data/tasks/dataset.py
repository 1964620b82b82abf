"""Batches of a task's rows, and the tasks by the names that a command line knows."""

import difflib
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from jaxtyping import Real

from recurjax.data.batches import Batch, Layout
from recurjax.data.config import Prefetch, Threads
from recurjax.data.loader import RowLoader
from recurjax.data.shuffle import EndlessOrder
from recurjax.data.tasks.copying import Copy
from recurjax.data.tasks.hash_hop import HashHop
from recurjax.data.tasks.mad import (
    BASELINES,
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    SelectiveCopying,
)
from recurjax.data.tasks.mqar import Mqar, Setting
from recurjax.data.tasks.needles import Needles
from recurjax.data.tasks.rows import RowLabels, Split, TaskRow, row_of
from recurjax.data.tasks.state_tracking import StateTracking
from recurjax.data.tokenizers import ByteTokenizer, Symbols, Tokenizer
from recurjax.errors import UserError
from recurjax.ranges import NonNegativeInt, RangeChecks, Seed, check_ranges

TaskConfig = (
    InContextRecall
    | FuzzyRecall
    | Memorization
    | SelectiveCopying
    | Compression
    | Mqar
    | Copy
    | StateTracking
    | HashHop
    | Needles
)
"""Every task: a closed union; JSON names the class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskData(RangeChecks):
    """A synthetic task instead of a corpus.

    Attributes:
      task: the task.
      seed: seed of the rows, and of the order in which a fixed training set is read.
      prefetch: batches that are prepared in advance; 0: each on demand.
      threads: threads that prepare batches.
      order: order of the training rows of a task with several settings (`Mqar`):
        "mixed", batches with rows of all settings, padded to the longest; "settings",
        as in Zoology: batches of one setting and its length, one setting after another
        in each epoch. The loss of such a batch is the mean over its own targets.
      stages: a curriculum: for each setting, the step from which its rows are drawn;
        the first is 0. (): all settings from step 0.
    """

    task: TaskConfig
    seed: Seed = 0
    prefetch: Prefetch = 8
    threads: Threads = 1
    order: Literal["mixed", "settings"] = "mixed"
    stages: tuple[NonNegativeInt, ...] = ()
    has_segments: ClassVar[bool] = False

    def __post_init__(self):
        check_ranges(self)
        if self.order == "mixed" and not self.stages:
            return
        if not isinstance(self.task, Mqar):
            raise UserError(
                "data.order and data.stages are for tasks with several settings, "
                f"and {type(self.task).__name__} has one: leave them out"
            )
        settings = len(self.task.train)
        rising = list(self.stages) == sorted(self.stages) and self.stages[:1] == (0,)
        if self.stages and not (len(self.stages) == settings and rising):
            raise UserError(
                f"data.stages must have {settings} ascending steps from 0 on, one "
                f"for each setting of the task, got {self.stages}"
            )


@dataclass(frozen=True, kw_only=True)
class TaskDataset:
    """A task's rows as batches; the counterpart of `recurjax.data.dataset.Dataset`."""

    config: TaskData

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Bytes where the task is text, numbers where it is not."""
        if isinstance(self.config.task, HashHop):
            return ByteTokenizer(bos=False)
        return Symbols(self.config.task.vocabulary)

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    @property
    def token_bytes(self) -> Real[np.ndarray, " V"]:
        """The bytes of text that each token counts for in bits per byte."""
        return self.tokenizer.token_bytes

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that the rows depend on."""
        # The class is part of it: two tasks may have the same fields.
        task = {"type": type(self.config.task).__name__, **asdict(self.config.task)}
        known: list[Any] = [task, self.config.seed]
        if self.config.order != "mixed" or self.config.stages:
            known += [self.config.order, self.config.stages]
        text = json.dumps(known, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def row(self, split: Split, number: int) -> TaskRow:
        """Returns one row, as long as the task makes it."""
        config = self.config
        # Rows are made on demand: no file, and no state but the number.
        return row_of(config.task, seed=config.seed, split=split, number=number)

    def count(self, split: Split) -> int | None:
        """Returns how many rows a split has; None: endless."""
        return self.config.task.count(split)

    def evaluation_length(self, length: int) -> int:
        """Returns the places of a row in the test, which may be longer than training's.

        Args:
          length: T of training.
        """
        # Long enough for either: a test may ask for longer rows than training's.
        return max(length, self.config.task.longest("validation"))

    def labels(self, split: Split, *, batch: int) -> Iterator[list[RowLabels]]:
        """Yields the labels of each batch's rows, in order."""
        if split not in self._labels:
            # A test has an end; `loader` refuses the others.
            count = self.count(split)
            assert count is not None
            rows = (self.row(split, number) for number in range(count))
            self._labels[split] = [
                RowLabels(row.slices, float(self.config.task.chances(row).sum()))
                for row in rows
            ]
        known = self._labels[split]
        for first in range(0, len(known), batch):
            yield known[first : first + batch]

    @cached_property
    def _labels(self) -> dict[Split, list[RowLabels]]:
        """A cache of `labels`: an evaluation does not make the rows again for them."""
        return {}

    def loader(
        self,
        split: Split,
        *,
        length: int,
        batch: int,
        rows: tuple[int, int] | None = None,
        seed: int | None = None,
        in_order: bool | None = None,
    ) -> RowLoader:
        """Returns batches of `batch` rows of `length` places.

        Rows shorter than `length` are filled up on the right with places that ask
        nothing. Those for training are endless: new rows for ever, or all rows of a
        fixed set in another order each epoch. Those in order are one pass over the
        split; its last batch is filled up with rows that ask nothing.

        Args:
          split: which part.
          length: T; at least as long as the split's longest row.
          batch: rows of the global batch, over all processes.
          rows: (first, after the last) row that this process delivers; None: all.
          seed: seed of the order; None: the config's.
          in_order: None: for "validation" only.

        Raises:
          UserError: rows of the task are longer.
        """
        if split not in get_args(Split):
            raise ValueError(
                f"TaskDataset: split must be train or validation, got {split!r}"
            )
        # Check here, before one of grain's threads meets a row that does not fit.
        longest = self.config.task.longest(split)
        if longest > length:
            raise UserError(
                f"{type(self.config.task).__name__} has {split} rows of {longest} "
                f"tokens, which exceed the batch's length {length}: set "
                f"--training.length {longest}"
            )
        config = self.config
        ordered = split == "validation" if in_order is None else in_order
        if ordered and self.count(split) is None:
            raise UserError(
                f"{type(self.config.task).__name__} draws training rows without "
                "end: read the split validation, or set the task's train_rows"
            )
        order, row_length = None, None
        if not ordered and (config.order != "mixed" or config.stages):
            assert isinstance(config.task, Mqar)
            order = SettingsOrder(
                [setting.rows for setting in config.task.train],
                batch=batch,
                turns=config.order == "settings",
                stages=config.stages,
                seed=config.seed if seed is None else seed,
            )
            if config.order == "settings":
                row_length = partial(_row_length, config.task)
        return RowLoader(
            order=order,
            row_length=row_length,
            fill=partial(self._fill, split),
            count=self.count(split),
            layout=Layout(
                length=length,
                batch=batch,
                rows=rows or (0, batch),
                segments=config.has_segments,
            ),
            in_order=ordered,
            seed=config.seed if seed is None else seed,
            fingerprint=self.fingerprint,
            split=split,
            prefetch=config.prefetch,
            threads=config.threads,
        )

    def _fill(self, split: Split, batch: Batch, r: int, number: int) -> None:
        row = self.row(split, number)
        batch["ids"][r, : len(row.ids)] = row.ids
        batch["targets"][r, : len(row.targets)] = row.targets


class SettingsOrder:
    """The number of the row at each place of training, for rows of several settings.

    A setting's rows are neighbours among a split's numbers.
    """

    def __init__(
        self,
        counts: Sequence[int],
        *,
        batch: int,
        turns: bool,
        stages: Sequence[int],
        seed: int,
    ):
        """Computes nothing yet.

        Args:
          counts: rows of each setting.
          batch: rows of a step.
          turns: a batch has one setting's rows; False: those of all that have begun.
          stages: the step at which each setting begins; (): all at 0.
          seed: seed of the orders of rows.
        """
        self._batch, self._turns = batch, turns
        self._stages = list(stages) or [0] * len(counts)
        # The first row and the first batch of an epoch that each setting has.
        self._first = [0, *accumulate(counts)]
        self._batches = [0, *accumulate(max(1, count // batch) for count in counts)]
        # All rows of the first n settings together, or each setting by itself.
        sizes = counts if turns else self._first[1:]
        self._orders = [EndlessOrder(size, seed) for size in sizes]

    def __call__(self, place: int) -> int:
        step, r = divmod(place, self._batch)
        last = bisect_right(self._stages, step) - 1  # of the settings that have begun
        step -= self._stages[last]
        if not self._turns:
            return self._orders[last](step * self._batch + r)
        epoch, at = divmod(step, self._batches[last + 1])
        setting = bisect_right(self._batches, at) - 1
        at += epoch * (self._batches[setting + 1] - self._batches[setting])
        at -= self._batches[setting]
        return self._first[setting] + self._orders[setting](at * self._batch + r)


def _row_length(task: Mqar, number: int) -> int:
    return task.setting("train", number).length


NAMED: dict[str, TaskConfig] = {
    "mqar": Mqar(),
    "hash_hop": HashHop(),
    "hash_hop_full": HashHop(chains="full"),
    "copy": Copy(),
    "needles": Needles(),
    "parity": StateTracking(group="parity"),
    "s3": StateTracking(group="S3"),
    "s5": StateTracking(group="S5"),
    **{f"mad_{name}": task for name, task in BASELINES.items()},
}
"""Each task as its source tests it."""


def check_named(name: str) -> None:
    """Raises UserError for a name that is none of the tasks."""
    if name in NAMED:
        return
    near = difflib.get_close_matches(name.lower(), NAMED, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMED)}"
    raise UserError(f"there is no task {name}: {hint}")


def name_of(task: TaskConfig) -> str:
    """Returns the name of a task, whatever its sizes."""
    match task:
        case Mqar():
            return "mqar"
        case HashHop():
            return "hash_hop" if task.chains == "one" else "hash_hop_full"
        case Copy():
            return "copy"
        case Needles():
            return "needles"
        case StateTracking():
            return task.group.lower()
        case InContextRecall():
            return "mad_noisy_recall" if task.noise else "mad_in_context_recall"
        case FuzzyRecall():
            return "mad_fuzzy_recall"
        case Memorization():
            return "mad_memorization"
        case SelectiveCopying():
            return "mad_selective_copying"
        case Compression():
            return "mad_compression"


def limited(task: TaskConfig, rows: int | None) -> TaskConfig:
    """Returns the task with at most `rows` test rows of each setting."""
    if rows is None:
        return task
    if isinstance(task, Mqar):
        settings = tuple(
            Setting(validation.length, validation.pairs, min(validation.rows, rows))
            for validation in task.validation
        )
        return replace(task, validation=settings)
    return replace(task, validation_rows=min(task.validation_rows, rows))
