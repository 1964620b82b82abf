"""MAD's six tasks, with the settings of its benchmark.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures", and
its public `configs/tasks`. A row of the benchmark has `length` tokens; the target of a
token is stored at that token's position.

Departs from the public generator: blanks of selective copying are placed by the row's
own random stream (there, by the process' global one), and no row is in both splits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Int32

from recurjax.data.tasks.rows import (
    Split,
    TaskRow,
    asked_at,
    chance_of_most_frequent,
    most,
    next_token_targets,
)
from recurjax.errors import UserError
from recurjax.ranges import (
    NonNegativeInt,
    PositiveInt,
    Range,
    RangeChecks,
    check_ranges,
)
from recurjax.types import IGNORED

TEST_ROWS = 1280
"""MAD's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mad(RangeChecks):
    """Sizes that MAD's six tasks share.

    Attributes:
      vocabulary: V, the number of tokens, special and noise tokens included.
      length: T, the tokens of a row.
      train_rows: number of rows of the fixed training set; None: new rows without end.
      validation_rows: rows of the test.
    """

    vocabulary: PositiveInt = 16
    length: Annotated[int, Range(least=2)] = 128
    train_rows: PositiveInt | None = 12_800
    validation_rows: PositiveInt = TEST_ROWS

    def count(self, split: Split) -> int | None:
        return self.train_rows if split == "train" else self.validation_rows

    def longest(self, split: Split) -> int:
        return self.length

    def _row(self, ids: np.ndarray, targets: np.ndarray) -> TaskRow:
        # The generator's own check: ids and targets line up.
        assert len(ids) == len(targets) == self.length
        ids, targets = ids.astype(np.int32), targets.astype(np.int32)
        return TaskRow(ids, targets, {"length": self.length})


@dataclass(frozen=True, kw_only=True, slots=True)
class InContextRecall(_Mad):
    """Pairs k v k' v' ...: after a key that has come before, its value.

    Learned from all tokens; tested on the values of keys that have come before. The
    last key always has. With noise, a pair may be two tokens of a vocabulary of its
    own: MAD's noisy recall is (vocabulary 32, noise_vocabulary 16, noise 0.2).

    Attributes:
      noise_vocabulary: number of noise tokens, the last ones of the vocabulary.
      noise: share of pairs that are noise.
    """

    noise_vocabulary: NonNegativeInt = 0
    noise: Annotated[float, Range(least=0, below=1)] = 0.0

    def __post_init__(self):
        check_ranges(self)
        _require_even(self, self.length)
        if self.noise > 0 and self.noise_vocabulary < 1:
            raise UserError(
                "InContextRecall: noise needs noise_vocabulary of at least 1: set "
                "it, or noise to 0"
            )
        _require_pairs(self, self.vocabulary - self.noise_vocabulary)

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        words = self.vocabulary - self.noise_vocabulary
        pairs = self.length // 2
        # As MAD: one place is kept free of noise, but it may be the last one, which
        # never is noise; then all others can be, so a first pair is forced.
        sure = rng.integers(pairs)
        values: dict[int, int] = {}
        tokens, scored = [], []
        for pair in range(pairs - 1):
            noisy = pair != sure and self.noise > 0 and rng.random() < self.noise
            if noisy and not (pair == pairs - 2 and not values):
                tokens += list(words + rng.integers(self.noise_vocabulary, size=2))
                scored += [False, False]
                continue
            key = int(rng.integers(words // 2))
            known = key in values
            if not known:
                values[key] = int(rng.integers(words // 2, words))
            tokens += [key, values[key]]
            scored += [False, known]
        key = list(values)[rng.integers(len(values))]
        ids = np.array([*tokens, key, values[key]], np.int32)
        probed = np.array([*scored, False, True])
        # Trained on every next token, tested on those that the row itself determines.
        targets = next_token_targets(ids) if split == "train" else asked_at(ids, probed)
        return self._row(ids, targets)

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """The value that came most often before; the key is as likely any before it."""
        half, result = (self.vocabulary - self.noise_vocabulary) // 2, row.ids * 0.0
        values: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for place in range(0, len(row.ids), 2):
            key, value = row.ids[place : place + 2].tolist()
            if key >= half:  # noise
                continue
            if row.targets[place] != IGNORED and key in values:
                guess = counts.most_common(1)[0][0]
                result[place] = list(values.values()).count(guess) / len(values)
            values[key] = value
            counts[value] += 1
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class FuzzyRecall(_Mad):
    """In-context recall with keys and values of one to several different tokens.

    In the test, keys have the full size. Rows that come out shorter are padded on the
    left with a token of its own, as in MAD.

    Attributes:
      key_size: tokens of the longest key.
      value_size: tokens of the longest value.
    """

    key_size: PositiveInt = 3
    value_size: PositiveInt = 3

    def __post_init__(self):
        check_ranges(self)
        words = self.vocabulary - 1
        if words // 2 < self.key_size or words - words // 2 < self.value_size:
            raise UserError(
                f"FuzzyRecall: vocabulary {self.vocabulary} is too small for keys "
                f"of {self.key_size} and values of {self.value_size} tokens: raise "
                "it"
            )
        # A probe at the end, a probe within, and one more pair must fit.
        if self.length <= 3 * (self.key_size + self.value_size):
            raise UserError(
                f"FuzzyRecall: length must exceed 3 (key_size + value_size) = "
                f"{3 * (self.key_size + self.value_size)}, got {self.length}"
            )

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        words, largest = self.vocabulary - 1, self.key_size + self.value_size

        def key() -> tuple[int, ...]:
            size = self.key_size
            if split == "train":
                size = int(rng.integers(1, size + 1))
            # Without replacement, as in MAD: the tokens of one key differ.
            return tuple(rng.choice(words // 2, size, replace=False).tolist())

        def value() -> tuple[int, ...]:
            size = int(rng.integers(1, self.value_size + 1))
            first = words // 2
            return tuple((first + rng.choice(words - first, size, False)).tolist())

        probe, answer = key(), value()
        size = len(probe) + len(answer)
        # MAD's position. Where that is after the last pair, MAD leaves the probe out
        # and asks for a value that the row does not contain; here the probe then comes
        # last.
        last_turn = self.length - size - 2 * largest
        probe_at = min(int(rng.integers(self.length - 2 * size)), last_turn)
        values: dict[tuple[int, ...], tuple[int, ...]] = {}
        tokens: list[int] = []
        scored: list[bool] = []
        # One more pair, the longest possible, and the probe at the end must fit.
        while len(tokens) < self.length - size - largest:
            due = probe not in values and len(tokens) >= probe_at
            k = probe if due else key()
            known = k in values
            if not known:
                values[k] = answer if k == probe else value()
            tokens += [*k, *values[k]]
            scored += [False] * len(k) + [known] * len(values[k])
        tokens += [*probe, *answer]
        scored += [False] * len(probe) + [True] * len(answer)
        pad = self.length - len(tokens)
        ids = np.array([self.vocabulary - 1] * pad + tokens, np.int32)
        probed = np.array([False] * pad + scored)
        targets = next_token_targets(ids) if split == "train" else asked_at(ids, probed)
        return self._row(ids, targets)

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """The most frequent continuation of the answer so far among earlier values."""
        half, result = (self.vocabulary - 1) // 2, np.zeros(len(row.ids))
        values: list[list[int]] = []
        current: list[int] = []
        for place, token in enumerate(row.ids.tolist()):
            if half <= token < self.vocabulary - 1:
                current.append(token)
            elif current:
                values.append(current)
                current = []
            if row.targets[place] != IGNORED:
                best = _continuations(values, current)
                right = int(row.targets[place]) in best
                result[place] = right / len(best) if right else 0.0
        return result


def _continuations(values: Sequence[Sequence[int]], prefix: Sequence[int]) -> list[int]:
    """Returns the most frequent tokens after a prefix of a value, else of any value."""
    n = len(prefix)
    counts = Counter(value[n] for value in values if value[:n] == prefix and value[n:])
    if not counts:
        counts = Counter(x for value in values for x in value if x not in prefix)
    most_often = max(counts.values(), default=0)
    return [token for token, count in counts.items() if count == most_often]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memorization(_Mad):
    """Pairs of a key and a place to insert its value, the same map in every row.

    The target is AT the insert token, which takes the value's position. The map is in
    the weights: no row contains it.

    Attributes:
      vocabulary: V, the number of tokens, special tokens included.
      length: T, the tokens of a row.
      train_rows: number of rows of the fixed training set; None: new rows without end.
      map_seed: seed of the map from keys to values.
    """

    vocabulary: PositiveInt = 256
    length: Annotated[int, Range(least=2)] = 32
    train_rows: PositiveInt | None = 256
    map_seed: Annotated[int, Range(least=0, below=2**63)] = 12345

    def __post_init__(self):
        check_ranges(self)
        _require_even(self, self.length)
        _require_pairs(self, self.vocabulary - 1)

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        keys, values = key_value_map(self.vocabulary - 1, self.map_seed)
        # With replacement: a key may come several times in a row.
        chosen = rng.integers(len(keys), size=self.length // 2)
        ids = np.full(self.length, self.vocabulary - 1, np.int32)
        targets = np.full(self.length, IGNORED, np.int32)
        # Key, insert token, key, insert token, ...
        ids[0::2] = keys[chosen]
        targets[1::2] = values[chosen]
        return self._row(ids, targets)

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """Any of the map's values."""
        _, values = key_value_map(self.vocabulary - 1, self.map_seed)
        return np.where(row.targets != IGNORED, 1 / len(values), 0.0)


@lru_cache(maxsize=16)
def key_value_map(
    words: int, seed: int
) -> tuple[Int32[np.ndarray, " N"], Int32[np.ndarray, " N"]]:
    """Returns MAD's fixed keys and their values: the n-th key has the n-th value.

    Both halves of the words are shuffled as lists, which draws as MAD's generator does,
    so that the map of a seed is the published one.
    """
    rng = np.random.default_rng(seed)
    keys: list[tuple[int]] = [(word,) for word in range(words // 2)]
    values: list[tuple[int]] = [(word,) for word in range(words // 2, words)]
    rng.shuffle(keys)
    rng.shuffle(values)
    count = min(len(keys), len(values))
    first = np.array([key for (key,) in keys[:count]], np.int32)
    return first, np.array([value for (value,) in values[:count]], np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveCopying(_Mad):
    """Tokens among blanks, then a copy token and blanks: there, the tokens in order.

    Attributes:
      vocabulary: V, the number of tokens, special tokens included.
      length: T, the tokens of a row.
      tokens_to_copy: number of tokens to copy.
    """

    vocabulary: Annotated[int, Range(least=4)] = 16
    length: Annotated[int, Range(least=2)] = 256
    tokens_to_copy: PositiveInt = 16

    def __post_init__(self):
        check_ranges(self)
        if self.length <= 2 * self.tokens_to_copy + 1:
            raise UserError(
                f"SelectiveCopying: length must exceed 2 tokens_to_copy + 1 = "
                f"{2 * self.tokens_to_copy + 1}, got {self.length}"
            )

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        N, blank = self.tokens_to_copy, self.vocabulary - 2
        tokens = rng.integers(self.vocabulary - 2, size=N)
        blanks = self.length - 2 * N - 1
        # Each blank comes before one of the tokens, never after the last.
        mixed = np.insert(tokens, rng.integers(N, size=blanks), blank)
        ids = np.concatenate([mixed, [self.vocabulary - 1], [blank] * N])
        targets = np.full(self.length, IGNORED)
        targets[-N:] = tokens
        return self._row(ids, targets)

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """The most frequent of the tokens, whatever their order."""
        return chance_of_most_frequent(row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression(_Mad):
    """Random tokens and a last one, whose state alone must tell them all.

    The targets are the row itself: the objective `Compress` decodes every place from
    the last position's state.

    Attributes:
      vocabulary: V, the number of tokens, special tokens included.
      length: T, the tokens of a row.
    """

    vocabulary: Annotated[int, Range(least=3)] = 16
    length: Annotated[int, Range(least=2)] = 32

    def draw(self, rng: np.random.Generator, split: Split, number: int) -> TaskRow:
        # Any token but the last of the vocabulary, which marks the end.
        ids = rng.integers(self.vocabulary - 1, size=self.length)
        ids[-1] = self.vocabulary - 1
        return self._row(ids, ids)

    def chances(self, row: TaskRow) -> Float[np.ndarray, " T"]:
        """The most frequent of the tokens; the last is the mark of the end."""
        share = most(row.ids[:-1].tolist()) / (len(row.ids) - 1)
        return np.append(np.full(len(row.ids) - 1, share), 1.0)


def _name(task: object) -> str:
    return type(task).__name__


def _require_even(task: object, length: int) -> None:
    if length % 2 or length < 4:
        raise UserError(
            f"{_name(task)}: length must be even and at least 4, got {length}"
        )


def _require_pairs(task: object, words: int) -> None:
    if words < 2:
        raise UserError(
            f"{_name(task)}: vocabulary leaves no words for keys and values: raise it"
        )


Name = Literal[
    "in_context_recall",
    "fuzzy_recall",
    "noisy_recall",
    "memorization",
    "selective_copying",
    "compression",
]
MadTask = InContextRecall | FuzzyRecall | Memorization | SelectiveCopying | Compression

BASELINES: dict[Name, MadTask] = {
    "in_context_recall": InContextRecall(),
    "fuzzy_recall": FuzzyRecall(),
    "noisy_recall": InContextRecall(vocabulary=32, noise_vocabulary=16, noise=0.2),
    "memorization": Memorization(),
    "selective_copying": SelectiveCopying(),
    "compression": Compression(),
}
"""MAD's baseline of each task."""

_FEWER = (6400, 3200, 1600, 800)
_RECALL = {
    "vocabulary": (32, 64, 128),
    "length": (256, 512, 1024),
    "train_rows": _FEWER,
}
CHANGES: dict[Name, dict[str, tuple]] = {
    "in_context_recall": _RECALL,
    "fuzzy_recall": _RECALL,
    # The 16 words of noise come on top.
    "noisy_recall": {
        **_RECALL,
        "vocabulary": (48, 80, 144),
        "noise": (0.4, 0.6, 0.8),
    },
    "memorization": {"vocabulary": (512, 1024, 2048, 4096, 8192)},
    "selective_copying": {
        "vocabulary": (32, 64, 128),
        "length": (512, 1024),
        "train_rows": _FEWER,
        "tokens_to_copy": (32, 64, 96),
    },
    "compression": {
        "vocabulary": (32, 64, 128),
        "length": (64, 128, 256),
        "train_rows": _FEWER,
    },
}
"""MAD's changes to the baseline, one at a time; a task's score is the mean of all."""
