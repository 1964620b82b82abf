"""Floors: no answer without keys does better, and the answers that reach them."""

from itertools import permutations

import numpy as np
import pytest

from recurjax.data.tasks import (
    Compression,
    Copy,
    FuzzyRecall,
    HashHop,
    InContextRecall,
    Mqar,
    Needles,
    SelectiveCopying,
    Setting,
    StateTracking,
    TaskRow,
    row_of,
)
from recurjax.data.tasks.rows import asked_at
from recurjax.types import IGNORED
from tests.data.tasks.test_tasks import TASKS, name


def rows(task, count=40):
    return [row_of(task, seed=3, split="validation", number=n) for n in range(count)]


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_chances_are_shares_where_something_is_asked(task):
    for row in rows(task, 3):
        chance, asked = task.chances(row), row.targets != IGNORED
        assert (chance[~asked] == 0).all() and chance.max() <= 1
        assert chance[asked].mean() < 1


@pytest.mark.parametrize(
    "task",
    [
        Mqar(
            vocabulary=64,
            train=(Setting(32, 4, 1),),
            validation=(Setting(32, 4, 40),),
        ),
        Needles(keys=8, values=4, hay=16, needles=4, length=24),
        SelectiveCopying(vocabulary=8, length=40, tokens_to_copy=6),
        Compression(vocabulary=6, length=12),
    ],
    ids=name,
)
def test_no_constant_answer_beats_the_floor_and_one_reaches_it(task):
    for row in rows(task, 5):
        answers = row.targets[row.targets != IGNORED]
        if isinstance(task, Compression):
            answers = answers[:-1]  # the last is the mark of the end, always right
        best = max((answers == token).sum() for token in set(answers.tolist()))
        floor = task.chances(row).sum() - isinstance(task, Compression)
        assert floor == pytest.approx(best)


def test_the_floor_of_recall_is_the_value_that_came_most_often():
    # Keys below 4, values from 4 on: 0 -> 5, 1 -> 5, 2 -> 6, then 2, 0 and 1 again.
    ids = np.array([0, 5, 1, 5, 2, 6, 2, 6, 0, 5, 1, 5], np.int32)
    asked = np.array([0] * 7 + [1, 0, 1, 0, 1], bool)
    row = TaskRow(ids, asked_at(ids, asked), {})
    task = InContextRecall(vocabulary=8, length=12)
    # 5 came twice, 6 once: right for two of three keys. Then 5 and 6 twice each: the
    # first of them. At last 5, three times.
    np.testing.assert_allclose(task.chances(row)[[6, 8, 10]], 2 / 3)
    rates = [
        task.chances(row).sum() / (row.targets != IGNORED).sum()
        for task in (InContextRecall(),)
        for row in rows(task, 60)
    ]
    assert 0.29 < np.mean(rates) < 0.35


def test_the_floor_of_copying_is_the_mean_over_all_orders_of_the_letters():
    task = Copy(letters=4, length=16, shortest=4, longest_string=5)
    begin, bar, end, pad = 4, 5, 6, 7
    letters, hits, chance = (0, 0, 1, 3), [], 0.0
    for order in permutations(letters):
        ids = np.array([begin, *order, bar, *order, end] + [pad] * 5, np.int32)
        asked = np.array([0] * 6 + [1] * 5 + [0] * 5, bool)
        chance = task.chances(TaskRow(ids, asked_at(ids, asked), {})).sum()
        # The most frequent letter that is left, whatever the order was.
        right = 1.0
        for n in range(4):
            left = list(order[n:])
            right += order[n] == max(sorted(set(left)), key=left.count)
        hits.append((right, chance))
    mean = np.mean(hits, axis=0)
    assert mean[0] == pytest.approx(mean[1])


def test_separators_of_a_chain_are_known_and_its_names_are_guessed():
    task = HashHop(size=2, hops=2, length=64)
    row = rows(task, 1)[0]
    chance = task.chances(row)
    text = bytes(row.ids.astype(np.uint8)).decode()
    for place in np.flatnonzero(row.targets != IGNORED):
        letter = chr(row.targets[place])
        assert (chance[place] == 1.0) or letter.isalpha()
        if text[place] == " ":  # a name's first letter, of one of six names
            continue
        if letter.isalpha() and not text[place].isalpha():
            assert 1 / task.pairs <= chance[place] < 1
    assert task.pairs == 6
    assert task.chain_floor() == pytest.approx((1 / 6 + 1 / 36) / 2)


def test_state_tracking_knows_its_first_element_and_fuzzy_recall_its_values():
    task = StateTracking(group="S3", length=8, validation_length=8)
    chance = task.chances(rows(task, 1)[0])
    np.testing.assert_allclose(chance, [1, *[1 / 6] * 7])
    task = FuzzyRecall(length=64)
    means = [
        task.chances(row).sum() / (row.targets != IGNORED).sum()
        for row in rows(task, 40)
    ]
    assert 0.3 < np.mean(means) < 0.6
