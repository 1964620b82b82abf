"""A task's rows: each a function of (task, seed, split, number) and of nothing else.

So any division of the rows over processes and any restart gives the same rows, and no
file holds them.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int32

from recurjax.errors import UserError
from recurjax.types import IGNORED

Split = Literal["train", "validation"]
"""Rows to learn from, and the rows that a task is tested on."""

HELD_OUT = 16
"""One row in HELD_OUT, by a hash of its tokens, is used for tests only."""

ATTEMPTS = 10_000
"""Draws before a split is called empty. One in 16 serves: 10,000 fail by chance with
probability 1e-280."""


class TaskRow(NamedTuple):
    """One row.

    Attributes:
      ids: what the model reads.
      targets: the expected token at each position; IGNORED: none.
      slices: labels by which accuracies are reported, such as {"pairs": 8, "length":
        64}.
    """

    ids: Int32[np.ndarray, " T"]
    targets: Int32[np.ndarray, " T"]
    slices: dict[str, int]


class RowLabels(NamedTuple):
    """The properties of a row by which accuracy is reported.

    Attributes:
      slices: as a `TaskRow`'s.
      floor: how many of the row's answers are right by chance: see `Task.chances`.
    """

    slices: dict[str, int]
    floor: float


@runtime_checkable
class Task(Protocol):
    """The interface of a family of rows, whose members are frozen dataclasses."""

    @property
    def vocabulary(self) -> int:
        """V: every id is in [0, V)."""
        ...

    def count(self, split: Split) -> int | None:
        """Returns how many rows a split has; None: endless."""
        ...

    def longest(self, split: Split) -> int:
        """Returns how many places the longest row of a split has."""
        ...

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        """Draws row `number` of a split; its class may depend on the number."""
        ...

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """Returns how likely the best answer that matches no key is right, by place.

        Such an answer knows what the row holds, but not which value belongs to which
        key, nor where a token was. Its mean over a test is the task's floor: accuracies
        up to it say nothing about recall. It is 0 where there is no target.
        """
        ...


def row_of(task: Task, *, seed: int, split: Split, number: int) -> TaskRow:
    """Returns row `number` of a split.

    The two splits share no row: a hash of the tokens decides which of them a row may
    belong to, and one that may not is drawn again.

    Raises:
      UserError: the task has too few different rows to hold some out.
    """
    for attempt in range(ATTEMPTS):
        # The split and the attempt are part of the key: no two draws share a stream.
        key = [seed, ("train", "validation").index(split), number, attempt]
        row = task.draw(np.random.default_rng(key), split, number)
        if held_out(row.ids) == (split == "validation"):
            return row
    raise UserError(
        f"{type(task).__name__}: {ATTEMPTS} draws give no new row for "
        f"{split}, because the task has too few different rows: make its "
        "rows longer"
    )


def held_out(ids: Int32[np.ndarray, " T"]) -> bool:
    """Returns whether a row may be tested on only; else it may be learned from only."""
    # Little-endian 32 bits whatever the machine: the hash decides the split for all.
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0


def most(items: Iterable[Hashable]) -> int:
    """Returns how often the most frequent item comes."""
    return max(Counter(items).values())


def chance_of_most_frequent(row: TaskRow) -> Float[np.ndarray, " T"]:
    """Returns the chances of the answer that the row asks most often."""
    counted = row.targets != IGNORED
    share = most(row.targets[counted].tolist()) / counted.sum()
    return np.where(counted, share, 0.0)


def next_token_targets(tokens: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
    """Returns the token after each place; IGNORED at the last."""
    return np.append(tokens[1:], IGNORED).astype(np.int32)


def asked_at(
    tokens: Int32[np.ndarray, " T"], scored: np.ndarray
) -> Int32[np.ndarray, " T"]:
    """Returns the next token where it is a target, else IGNORED."""
    targets = next_token_targets(tokens)
    # `scored` marks the answer's own position; its target is one position earlier.
    return np.where(np.append(scored[1:], False), targets, IGNORED).astype(np.int32)
