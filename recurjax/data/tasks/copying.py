"""Copy a string of letters.

Source: Jelassi et al. 2024, "Repeat After Me": "$letters|letters.", several in a row
while they fit, lengths uniform; only the letters after the bar are targets. A model
whose state has a fixed size cannot copy strings that hold more bits than it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from recurjax.data.tasks.rows import Split, TaskRow, asked_at, most
from recurjax.errors import UserError
from recurjax.ranges import PositiveInt, check_ranges
from recurjax.types import IGNORED


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copying strings; tokens are the letters, then begin, bar, end and padding.

    Attributes:
      letters: number of different letters.
      length: T, the tokens of a row.
      shortest: letters of the shortest string.
      longest_string: letters of the longest string.
      validation_shortest: letters of the shortest string in the test, whose rows hold
        one string each and are padded; None: as in training.
      validation_longest: letters of the longest string in the test; None: as in
        training.
      train_rows: number of rows of the fixed training set; None: new rows without end.
      validation_rows: rows of the test.
    """

    letters: PositiveInt = 26
    length: PositiveInt = 220
    shortest: PositiveInt = 20
    longest_string: PositiveInt = 50
    validation_shortest: PositiveInt | None = None
    validation_longest: PositiveInt | None = None
    train_rows: PositiveInt | None = None
    validation_rows: PositiveInt = 1000

    def __post_init__(self):
        check_ranges(self)
        for split in ("train", "validation"):
            low, high = self._lengths(split)
            if low > high:
                raise UserError(
                    f"Copy: shortest must be at most longest, got {low} and {high} in "
                    f"{split}"
                )
            # begin, the string, bar, the string again, end.
            if 2 * high + 3 > self.length:
                raise UserError(
                    f"Copy: a string of {high} letters and its copy take "
                    f"{2 * high + 3} tokens and rows have {self.length}: shorten the "
                    "string or raise length"
                )

    @property
    def vocabulary(self) -> int:
        """Letters and four marks."""
        return self.letters + 4

    def count(self, split: Split) -> int | None:
        return self.train_rows if split == "train" else self.validation_rows

    def longest(self, split: Split) -> int:
        return self.length

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        begin, bar, end, pad = (self.letters + mark for mark in range(4))
        low, high = self._lengths(split)
        tokens: list[int] = []
        scored: list[bool] = []
        size = 0
        # A test row holds one string, so that its accuracy is that string's.
        while len(tokens) < self.length and not (split == "validation" and tokens):
            size = int(rng.integers(low, high + 1))
            string = rng.integers(self.letters, size=size).tolist()
            tokens += [begin, *string, bar, *string, end]
            # The targets are the copy and its end mark; the string before the bar is
            # random.
            scored += [False] * (size + 2) + [True] * (size + 1)
        if len(tokens) > self.length:  # the last of a training row is cut
            # A copy that the row's end cuts has no targets.
            begin = len(tokens) - (2 * size + 3)
            scored[begin:] = [False] * (2 * size + 3)
        ids = np.full(self.length, pad, np.int32)
        known = min(len(tokens), self.length)
        ids[:known] = tokens[:known]
        probed = np.zeros(self.length, bool)
        probed[:known] = scored[:known]
        # Only there does a row have one length of string.
        slices = {"string": size} if split == "validation" else {}
        return TaskRow(ids, asked_at(ids, probed), {"length": self.length, **slices})

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """The most frequent of the letters that are left, whatever their order."""
        result, values = np.zeros(len(row.ids)), []
        # From the end of each copy to its beginning: the mark of the end is certain,
        # because no letter is left.
        for place in np.flatnonzero(row.targets != IGNORED)[::-1]:
            if row.targets[place] >= self.letters:
                result[place], values = 1.0, []
                continue
            values.append(int(row.targets[place]))
            result[place] = most(values) / len(values)
        return result

    def _lengths(self, split: str) -> tuple[int, int]:
        train = self.shortest, self.longest_string
        if split == "train":
            return train
        low, high = self.validation_shortest, self.validation_longest
        # A length of 0 is not None: the task refuses it.
        return (
            train[0] if low is None else low,
            train[1] if high is None else high,
        )
