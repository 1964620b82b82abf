"""State tracking: read generators of a group, say the product so far at every place.

S3 is solvable, S5 is not: constant-depth parallel models track the first and provably
not the second (Merrill et al. 2024, "The Illusion of State in State-Space Models";
Liu et al. 2023). Parity is the group of two.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Literal

import numpy as np
from jaxtyping import Float, Int32

from recurjax.data.tasks.rows import Split, TaskRow
from recurjax.ranges import PositiveInt, RangeChecks

Group = Literal["parity", "S3", "S5"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTracking(RangeChecks):
    """State tracking: elements of a group as input, the products so far as targets.

    Attributes:
      group: the group whose elements are composed; token n is the n-th element.
      length: T, the tokens of a training row.
      validation_length: T of the test rows; None: 4 T, so that the test reaches
        positions beyond training. Accuracy is reported by position.
      train_rows: number of rows of the fixed training set; None: new rows without end.
      validation_rows: rows of the test.
    """

    group: Group = "S3"
    length: PositiveInt = 64
    validation_length: PositiveInt | None = None
    train_rows: PositiveInt | None = None
    validation_rows: PositiveInt = 1000

    @property
    def vocabulary(self) -> int:
        """One token per element."""
        return len(multiplication(self.group))

    def count(self, split: Split) -> int | None:
        return self.train_rows if split == "train" else self.validation_rows

    def longest(self, split: Split) -> int:
        if split == "train":
            return self.length
        return self.validation_length or 4 * self.length

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        table = multiplication(self.group)
        ids = rng.integers(len(table), size=self.longest(split), dtype=np.int32)
        states, state = np.empty_like(ids), 0
        for t, element in enumerate(ids):
            state = table[element, state]
            states[t] = state
        return TaskRow(ids, states, {"length": len(ids)})

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """Any element; the first product is the first element."""
        result = np.full(len(row.ids), 1 / self.vocabulary)
        result[0] = 1.0
        return result


@lru_cache(maxsize=3)
def multiplication(group: Group) -> Int32[np.ndarray, "N N"]:
    """Returns the table of products: entry [a, b] is the element a b, b done first.

    Element 0 is the identity.
    """
    size = {"parity": 2, "S3": 3, "S5": 5}[group]
    elements = list(permutations(range(size)))
    numbers = {element: number for number, element in enumerate(elements)}
    return np.array(
        [[numbers[tuple(a[i] for i in b)] for b in elements] for a in elements],
        np.int32,
    )
