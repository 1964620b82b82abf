"""Multi-query associative recall: many pairs, then their keys among random tokens.

Source: Arora et al. 2023, "Zoology", section 4 and the public generator. Each key comes
once among the pairs and once as a query, at a gap that follows a power law.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from recurjax.data.tasks.rows import Split, TaskRow, chance_of_most_frequent
from recurjax.errors import UserError
from recurjax.ranges import PositiveFloat, PositiveInt, check_ranges
from recurjax.types import IGNORED


@dataclass(frozen=True, slots=True)
class Setting:
    """A part of a split with rows of one size.

    Attributes:
      length: T, the tokens of a row.
      pairs: key-value pairs per row.
      rows: number of rows.
    """

    length: PositiveInt
    pairs: PositiveInt
    rows: PositiveInt

    def __post_init__(self):
        check_ranges(self)
        if self.length % 2:
            raise UserError(f"Setting.length: must be even, got {self.length}")
        # A pair and its query take two tokens each.
        if 4 * self.pairs > self.length:
            raise UserError(
                f"Setting: {self.pairs} pairs and as many queries take "
                f"{4 * self.pairs} tokens and rows have {self.length}: raise "
                "length or lower pairs"
            )


FIGURE_2_TRAIN = (
    Setting(64, 4, 100_000),
    *(Setting(128, 8, 20_000), Setting(256, 16, 20_000)),
    *(Setting(256, 32, 20_000), Setting(256, 64, 20_000)),
)
FIGURE_2_TEST = (
    *(Setting(64, 4, 1000), Setting(64, 8, 1000), Setting(64, 16, 1000)),
    *(Setting(128, 32, 1000), Setting(256, 64, 1000)),
    *(Setting(512, 128, 1000), Setting(1024, 256, 1000)),
)
"""The setting of Zoology's figure 2 that RecurFormer trains and tests on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mqar:
    """Multi-query associative recall: pairs of keys and values, then keys to look up.

    Attributes:
      vocabulary: V: keys are from the first half without token 0, values from the
        second.
      train: settings of the training rows.
      validation: settings of the test rows.
      power: a in P(gap g) ~ a g^(a - 1); 1 is uniform, 0.01 favours short gaps.
      random_non_queries: fill the places between queries with random tokens; off: with
        token 0.
    """

    vocabulary: PositiveInt = 8192
    train: tuple[Setting, ...] = FIGURE_2_TRAIN
    validation: tuple[Setting, ...] = FIGURE_2_TEST
    power: PositiveFloat = 0.01
    random_non_queries: bool = True

    def __post_init__(self):
        check_ranges(self)
        for settings in (self.train, self.validation):
            if not settings:
                raise UserError("Mqar: each split needs at least one setting")
            most = max(setting.pairs for setting in settings)
            if most > self.vocabulary // 2 - 1:
                raise UserError(
                    f"Mqar: {most} different keys need a vocabulary of at least "
                    f"{2 * most + 2}, got {self.vocabulary}"
                )

    def count(self, split: Split) -> int:
        return sum(setting.rows for setting in self._settings(split))

    def longest(self, split: Split) -> int:
        return max(setting.length for setting in self._settings(split))

    def setting(self, split: Split, number: int) -> Setting:
        """Returns the part that row `number` of a split belongs to."""
        for setting in self._settings(split):
            if number < setting.rows:
                return setting
            number -= setting.rows
        raise IndexError(f"Mqar: {split} has {self.count(split)} rows")

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        setting = self.setting(split, number)
        length, pairs = setting.length, setting.pairs
        half = self.vocabulary // 2
        # Different keys: each has one value in a row.
        keys = 1 + rng.choice(half - 1, pairs, replace=False)
        values = half + rng.choice(self.vocabulary - half, pairs, replace=False)
        ids = np.zeros(length, np.int32)
        ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2] = keys, values
        # Queries are at even positions after the pairs, so that none follows another.
        places = (length - 2 * pairs) // 2
        odds = np.arange(1, places + 1) ** (self.power - 1.0)
        # Without replacement: two queries cannot share a position.
        gaps = rng.choice(places, pairs, replace=False, p=odds / odds.sum())
        at = 2 * pairs + 2 * gaps
        ids[at] = keys
        targets = np.full(length, IGNORED, np.int32)
        # The target is at the query itself: the state there must name the value.
        targets[at] = values
        # Token 0 is not a key: it marks the places without one.
        free = ids == 0
        if self.random_non_queries:
            ids[free] = rng.integers(self.vocabulary, size=int(free.sum()))
        return TaskRow(ids, targets, {"length": length, "pairs": pairs})

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """Any of the row's values, each of which is queried once."""
        return chance_of_most_frequent(row)

    def _settings(self, split: Split) -> tuple[Setting, ...]:
        return self.train if split == "train" else self.validation
