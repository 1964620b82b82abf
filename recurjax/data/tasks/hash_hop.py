"""HashHop: follow a chain through shuffled pairs of random strings.

Source: Magic's public generator (2024), whose prompt is full of chains of the same
length, and RecurFormer's appendix A.1, which has one chain among pairs that lead
nowhere. Score: the longest right beginning of the answer over the chain's length.
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from recurjax.data.tasks.rows import Split, TaskRow, most
from recurjax.errors import UserError
from recurjax.ranges import PositiveInt, check_ranges
from recurjax.types import IGNORED

ALPHABET = string.ascii_lowercase + string.ascii_uppercase
BAR, END = ">", "\n"


class Problem(NamedTuple):
    """A prompt, and the elements that the answer should name in order."""

    prompt: str
    answer: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HashHop:
    """HashHop over bytes: follow a chain through shuffled pairs of strings.

    A row is the pairs, a line each, then the first element and the hops:

        aB = cD
        eF = gH
        >aB = cD = ...

    Attributes:
      size: characters of a string.
      hops: pairs of a chain.
      length: T, the bytes of a row, prompt and answer.
      chains: "one": the queried chain, and pairs that belong to no chain; "full": as
        many complete chains as fit, one of which is queried.
      thoughts: answer with every element of the chain (chain of thought); off: with the
        last.
      train_rows: number of rows of the fixed training set; None: new rows without end.
      validation_rows: rows of the test.
    """

    size: PositiveInt = 8
    hops: PositiveInt = 16
    length: PositiveInt = 6144
    chains: Literal["one", "full"] = "one"
    thoughts: bool = True
    train_rows: PositiveInt | None = None
    validation_rows: PositiveInt = 1000

    def __post_init__(self):
        check_ranges(self)
        if self.pairs < self.hops:
            raise UserError(
                f"HashHop: {self.hops} hops over strings of {self.size} letters "
                f"take {self.length_of(self.hops)} bytes and rows have "
                f"{self.length}: raise length or lower hops or size"
            )
        # Names are drawn again until they are new: with half of all of them free that
        # takes two draws a name.
        if self._elements() > len(ALPHABET) ** self.size // 2:
            raise UserError(
                f"HashHop: size {self.size} gives too few strings for {self.pairs} "
                "pairs of different ones: raise size"
            )

    @property
    def vocabulary(self) -> int:
        """Bytes."""
        return 256

    @property
    def pairs(self) -> int:
        """How many pairs a prompt has."""
        # A prompt of full chains has complete chains only.
        fit = (self.length - self._answer_bytes()) // self._pair_bytes()
        return fit if self.chains == "one" else fit // self.hops * self.hops

    def length_of(self, pairs: int) -> int:
        """Returns the bytes of a row with `pairs` pairs."""
        return pairs * self._pair_bytes() + self._answer_bytes()

    def count(self, split: Split) -> int | None:
        return self.train_rows if split == "train" else self.validation_rows

    def longest(self, split: Split) -> int:
        return self.length

    def problem(self, rng: np.random.Generator) -> Problem:
        """Draws a prompt, up to and with the first element, and its answer."""
        names = self._names(rng)
        count = 1 if self.chains == "one" else self.pairs // self.hops
        chains = [[next(names) for _ in range(self.hops + 1)] for _ in range(count)]
        # Neighbours in a chain are its pairs, which are then shuffled among all others.
        lines = [f"{a} = {b}" for chain in chains for a, b in pairwise(chain)]
        lines += [
            f"{next(names)} = {next(names)}" for _ in range(self.pairs - len(lines))
        ]
        shuffled = [lines[n] for n in rng.permutation(len(lines))]
        first, *answer = chains[0]
        reply = tuple(answer if self.thoughts else answer[-1:])
        return Problem("\n".join(shuffled) + f"\n{BAR}{first}", reply)

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        problem = self.problem(rng)
        answer = "".join(f" = {element}" for element in problem.answer) + END
        text = (problem.prompt + answer).encode()
        # Every row has the same bytes: names are of one size.
        assert len(text) == self.length_of(self.pairs)
        ids = np.zeros(self.length, np.int32)
        ids[: len(text)] = np.frombuffer(text, np.uint8)
        targets = np.full(self.length, IGNORED, np.int32)
        first = len(problem.prompt.encode())
        # Targets stand one place before the token that they ask for.
        targets[first - 1 : len(text) - 1] = ids[first : len(text)]
        return TaskRow(ids, targets, {"length": self.length, "hops": self.hops})

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """A name's most frequent continuation among the names on the right of pairs."""
        result, name = np.zeros(len(row.ids)), ""
        text = bytes(row.ids.astype(np.uint8)).decode()
        lines = text[: text.index(BAR)].splitlines()
        names = [line.split(" = ")[1] for line in lines]
        for place in np.flatnonzero(row.targets != IGNORED):
            letter = chr(int(row.targets[place]))
            if not letter.isalpha():  # a separator, whose place is known
                result[place], name = 1.0, ""
                continue
            ends = [other[len(name)] for other in names if other.startswith(name)]
            result[place] = most(ends) / len(ends)
            name += letter
        return result

    def chain_floor(self) -> float:
        """Returns the floor of the score: each element is one of the pairs' right."""
        p, elements = 1 / self.pairs, self.hops if self.thoughts else 1
        return sum(p**hop for hop in range(1, elements + 1)) / elements

    def _elements(self) -> int:
        # A chain of n pairs has n + 1 elements, each the end of one pair and the start
        # of the next; a pair of no chain has two of its own.
        if self.chains == "full":
            return self.pairs // self.hops * (self.hops + 1)
        return self.hops + 1 + 2 * (self.pairs - self.hops)

    def _names(self, rng: np.random.Generator) -> Iterator[str]:
        """Draws different strings, so that no pair continues another by chance."""
        letters = np.frombuffer(ALPHABET.encode(), "S1")
        names: dict[str, None] = {}  # in the order drawn
        count = self._elements()
        while len(names) < count:
            # Draw all at once with numpy, then as strings. The next iteration replaces
            # duplicates.
            drawn = letters[rng.integers(len(letters), size=(count, self.size))]
            joined = np.ascontiguousarray(drawn).view(f"S{self.size}")[:, 0]
            names |= dict.fromkeys(joined.astype(str).tolist())
        return iter(names)

    def _pair_bytes(self) -> int:
        return 2 * self.size + len(" = ") + len("\n")

    def _answer_bytes(self) -> int:
        elements = self.hops if self.thoughts else 1
        return len(BAR) + self.size + elements * (len(" = ") + self.size) + len(END)


def right_share(answer: tuple[str, ...], reply: str) -> float:
    """Returns the longest right beginning of what was said over the answer's length.

    Args:
      answer: the elements that should be named.
      said: what was generated after the first element: " = cD = eF ...".
    """
    named = [element.strip() for element in reply.split(END)[0].split("=")[1:]]
    right = 0
    # Counted up to the first wrong element: what comes after it does not follow from
    # the prompt any more.
    for want, got in zip(answer, named, strict=False):
        if want != got:
            break
        right += 1
    return right / len(answer)
