"""Every task: rows from numbers alone, splits apart, ids and targets in range."""

import subprocess
import sys

import numpy as np
import pytest

from recurjax.data.tasks import (
    Compression,
    Copy,
    FuzzyRecall,
    HashHop,
    InContextRecall,
    Memorization,
    Mqar,
    Needles,
    SelectiveCopying,
    Setting,
    StateTracking,
    row_of,
)
from recurjax.errors import UserError
from recurjax.types import IGNORED
from tests.source_tree import ROOT

SMALL_MQAR = Mqar(
    vocabulary=64,
    train=(Setting(16, 2, 5), Setting(32, 4, 3)),
    validation=(Setting(64, 16, 4),),
)
TASKS = [
    InContextRecall(length=32),
    InContextRecall(length=32, vocabulary=32, noise_vocabulary=16, noise=0.8),
    FuzzyRecall(length=64),
    Memorization(),
    SelectiveCopying(length=64),
    Compression(),
    SMALL_MQAR,
    Copy(length=64, shortest=3, longest_string=9),
    Needles(keys=8, values=8, hay=16, needles=3, length=40),
    StateTracking(group="parity", length=24),
    StateTracking(group="S3", length=16),
    StateTracking(group="S5", length=16),
    HashHop(size=4, hops=4, length=200),
    HashHop(size=4, hops=4, length=200, chains="full", thoughts=False),
]


def name(task) -> str:
    return type(task).__name__


@pytest.mark.parametrize("task", TASKS, ids=name)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_lie_in_the_vocabulary_and_ask_something(task, split):
    for number in range(4):
        row = row_of(task, seed=1, split=split, number=number)
        assert row.ids.dtype == row.targets.dtype == np.int32
        assert row.ids.shape == row.targets.shape
        assert len(row.ids) <= task.longest(split)
        assert row.ids.min() >= 0 and row.ids.max() < task.vocabulary
        asked = row.targets[row.targets != IGNORED]
        assert len(asked) and asked.min() >= 0 and asked.max() < task.vocabulary


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_a_row_depends_on_its_seed_split_and_number_only(task):
    def row(seed, split, number):
        return row_of(task, seed=seed, split=split, number=number).ids.tobytes()

    assert row(0, "train", 3) == row(0, "train", 3)
    assert row(0, "train", 3) != row(1, "train", 3)
    assert row(0, "train", 3) != row(0, "train", 2)


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_no_row_is_learned_from_and_tested_on(task):
    rows = {
        split: {
            row_of(task, seed=seed, split=split, number=n).ids.tobytes()
            for n in range(4)
            for seed in range(10)
        }
        for split in ("train", "validation")
    }
    assert not rows["train"] & rows["validation"]


def test_a_task_with_nothing_to_hold_out_says_so():
    with pytest.raises(UserError, match="too few different rows"):
        row_of(
            StateTracking(group="parity", length=1, validation_length=1),
            seed=0,
            split="validation",
            number=0,
        )


def test_another_process_makes_the_same_bytes():
    code = """
import hashlib
from tests.data.tasks.test_tasks import TASKS, row_of
digest = hashlib.sha256()
for task in TASKS:
    for split in ("train", "validation"):
        row = row_of(task, seed=7, split=split, number=2)
        digest.update(row.ids.tobytes() + row.targets.tobytes())
print(digest.hexdigest())
"""
    by_name = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(by_name) == 1
    # Noted, so that a change of a generator, or of numpy's streams, is seen.
    assert (
        by_name.pop().strip()
        == "0bb8dcbf412351710b5a102de8966ee43f2503a5a8669d0d39a667ebb9f8d885"
    )


def pairs_of_four(vocabulary):
    setting = (Setting(32, 4, 1),)
    return Mqar(vocabulary=vocabulary, train=setting, validation=setting)


def test_four_keys_fit_into_the_vocabulary_that_the_refusal_names():
    assert pairs_of_four(10).vocabulary == 10


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: InContextRecall(length=7), "even"),
        (lambda: InContextRecall(noise=0.5), "noise_vocabulary"),
        (lambda: InContextRecall(vocabulary=3, noise_vocabulary=2), "no words"),
        (lambda: InContextRecall(noise=float("nan")), r"Recall\.noise: must be finite"),
        (lambda: FuzzyRecall(length=18), "length must exceed"),
        (lambda: FuzzyRecall(vocabulary=6), "vocabulary .* is too small"),
        (lambda: SelectiveCopying(length=33), "length must exceed"),
        (lambda: Setting(16, 5, 1), "take 20 tokens"),
        (lambda: Setting(15, 1, 1), r"Setting\.length: must be even, got 15"),
        (lambda: Setting(16, 1, 0), r"Setting\.rows: must be >= 1, got 0"),
        (lambda: Mqar(vocabulary=8), "need a vocabulary"),
        (lambda: pairs_of_four(9), "vocabulary of at least 10, got 9"),
        (lambda: Mqar(power=float("nan")), r"Mqar\.power: must be finite"),
        (lambda: Copy(length=100), "take 103 tokens"),
        (lambda: Copy(shortest=9, longest_string=8), "shortest must be at most"),
        (lambda: Copy(letters=0), r"Copy\.letters: must be >= 1, got 0"),
        (lambda: Copy(train_rows=0), r"Copy\.train_rows: must be >= 1, got 0"),
        (lambda: Copy(validation_rows=-2), r"\.validation_rows: must be >= 1, got -2"),
        (lambda: Copy(validation_shortest=0),
         r"validation_shortest: must be >= 1, got 0"),
        (lambda: Copy(validation_longest=9), "got 20 and 9 in"),
        (lambda: StateTracking(length=0), r"Tracking\.length: must be >= 1, got 0"),
        (lambda: Needles(length=20), "take 24 tokens"),
        (lambda: Needles(keys=4), "as many different keys, got 4"),
        (lambda: HashHop(length=100), "rows have 100"),
        (lambda: HashHop(hops=0), r"HashHop\.hops: must be >= 1, got 0"),
        (lambda: HashHop(train_rows=-1), r"HashHop\.train_rows: must be >= 1, got -1"),
        (lambda: HashHop(validation_rows=0), r"\.validation_rows: must be >= 1, got 0"),
        (lambda: HashHop(size=1, hops=4, length=400), "too few"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(make, said):
    with pytest.raises(UserError, match=said):
        make()
