"""CORE: in-context learning over many tasks, scored as nanochat does (DCLM's suite)."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from recurjax.errors import UserError
from recurjax.evaluation.core.prompts import Task, cropped, prompts
from recurjax.evaluation.scorer import Pair, Score

SHUFFLE_SEED = 1337
"""Of a task's items, before a limit cuts them."""


class TaskScore(NamedTuple):
    """Accuracy of a task, and how far it lies above guessing: 0 is chance, 1 all."""

    label: str
    accuracy: float
    centered: float
    items: int


class ItemScore(NamedTuple):
    """One item: whether it is right, and its options' mean losses (none for greedy)."""

    correct: bool
    losses: tuple[float, ...]


class CoreScore(NamedTuple):
    """The mean of the tasks' centered accuracies."""

    core: float
    tasks: tuple[TaskScore, ...]


def score_core(
    tasks: Iterable[Task],
    score: Score,
    encode: Callable[[list[str]], Sequence[Sequence[int]]],
    *,
    limit: int | None = None,
    longest: int | None = None,
    report: Callable[[TaskScore], None] = lambda _: None,
) -> CoreScore:
    """Scores every task.

    Args:
      score: the model; a task's pairs are scored in one call.
      encode: texts -> token rows, with BOS in front.
      limit: items a task, the first of a fixed shuffle; None: all.
      longest: prompts lose their first tokens beyond so many; None: never.
      report: called with each task's score as it comes.

    Raises:
      UserError: a task has too few items for its examples, or its prompts do not fit.
    """
    tasks = [shuffled(task, limit) for task in tasks]
    for task in tasks:
        # An item is none of its own examples.
        if len(task.items) <= task.fewshot:
            raise UserError(
                f"{task.label} shows {task.fewshot} examples before an item and has "
                f"only {len(task.items)} items: raise the limit or leave it out"
            )
    scores = []
    for task in tasks:
        items = score_items(task, score, encode, longest=longest)
        accuracy = float(np.mean([item.correct for item in items]))
        chance = 0.01 * task.baseline
        # 0 is guessing and 1 all right, so that tasks can be averaged (DCLM, section
        # 3.5).
        centered = (accuracy - chance) / (1.0 - chance)
        scores.append(TaskScore(task.label, accuracy, centered, len(items)))
        report(scores[-1])
    if not scores:
        raise ValueError("score_core: there are no tasks")
    return CoreScore(float(np.mean([s.centered for s in scores])), tuple(scores))


def shuffled(task: Task, limit: int | None) -> Task:
    """Returns a task with its items in the fixed random order, at most `limit`."""
    items = list(task.items)
    # A generator of its own: Python's global one may have been seeded otherwise.
    random.Random(SHUFFLE_SEED).shuffle(items)
    return dataclasses.replace(task, items=tuple(items[:limit]))


def score_items(
    task: Task,
    score: Score,
    encode: Callable[[list[str]], Sequence[Sequence[int]]],
    *,
    longest: int | None = None,
) -> list[ItemScore]:
    """Scores a task's items: the option of least mean loss, or all-greedy tokens."""
    rows = [
        [cropped(prompt, longest) for prompt in prompts(task, number, encode)]
        for number in range(len(task.items))
    ]
    pairs = [
        Pair(tuple(row.ids[: row.start]), tuple(row.ids[row.start : row.end]))
        for item in rows
        for row in item
    ]
    # All pairs in one call: the scorer sorts them by length over the whole task.
    scored = iter(score(pairs))
    items = []
    for number, item in enumerate(rows):
        found = [next(scored) for _ in item]
        if task.kind == "language_modeling":
            items.append(ItemScore(found[0].greedy, ()))
            continue
        # The mean over tokens, not the sum: options differ in length.
        means = tuple(float(np.mean(one.nats)) for one in found)
        right = int(np.argmin(means)) == task.items[number]["gold"]
        items.append(ItemScore(right, means))
    return items
