"""Needles in a haystack of symbols: distant pairs, queried at the end of the row.

RULER's needles (Hsieh et al. 2024) hide in text, which a small model must first learn
to read. Here hay, keys and values are symbols of three kinds, so that what is measured
is the distance alone: a window that ends before the needle cannot answer, and a state
of a fixed size must keep all needles.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from recurjax.data.tasks.rows import Split, TaskRow, chance_of_most_frequent
from recurjax.errors import UserError
from recurjax.ranges import PositiveInt, check_ranges
from recurjax.types import IGNORED


@dataclass(frozen=True, kw_only=True, slots=True)
class Needles:
    """Hay with `needles` pairs of a key and its value, then all keys in another order.

    The value is the target AT its key's second occurrence; a key comes twice in a row,
    a value may come several times. Tokens are keys, then values, then hay.

    Attributes:
      keys: number of different keys.
      values: number of different values.
      hay: number of different hay tokens.
      needles: key-value pairs per row.
      length: T, the tokens of a row.
      train_rows: number of rows of the fixed training set; None: new rows without end.
      validation_rows: rows of the test.
    """

    keys: PositiveInt = 32
    values: PositiveInt = 32
    hay: PositiveInt = 64
    needles: PositiveInt = 8
    length: PositiveInt = 512
    train_rows: PositiveInt | None = None
    validation_rows: PositiveInt = 1000

    def __post_init__(self):
        check_ranges(self)
        if self.keys < self.needles:
            raise UserError(
                f"Needles: {self.needles} needles need at least as many different "
                f"keys, got {self.keys}: raise keys"
            )
        # A pair and its question take three tokens.
        if self.length < 3 * self.needles:
            raise UserError(
                f"Needles: {self.needles} needles and their questions take "
                f"{3 * self.needles} tokens and rows have {self.length}: raise "
                "length or lower needles"
            )

    @property
    def vocabulary(self) -> int:
        """Keys, values and hay."""
        return self.keys + self.values + self.hay

    def count(self, split: Split) -> int | None:
        return self.train_rows if split == "train" else self.validation_rows

    def longest(self, split: Split) -> int:
        return self.length

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        N, body = self.needles, self.length - self.needles
        keys = rng.choice(self.keys, N, replace=False)
        values = self.keys + rng.integers(self.values, size=N)
        ids = self.keys + self.values + rng.integers(self.hay, size=self.length)
        # Draw positions in a body whose pairs are shrunk to one token, then shift
        # needle n right by n: no two overlap, and all depths are equally likely.
        at = np.sort(rng.choice(body - N, N, replace=False)) + np.arange(N)
        ids[at], ids[at + 1] = keys, values
        order = rng.permutation(N)
        ids[body:] = keys[order]
        targets = np.full(self.length, IGNORED, np.int32)
        targets[body:] = values[order]
        return TaskRow(
            ids.astype(np.int32), targets, {"length": self.length, "needles": N}
        )

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """The value that most needles have."""
        return chance_of_most_frequent(row)
