"""CORE: in-context learning over many tasks, scored as nanochat does (DCLM's suite)."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from recurjax.errors import UserError
from recurjax.evaluation.core_prompts import Prompt, Task, cropped, prompts

SHUFFLE_SEED = 1337
"""Of a task's items, before a limit cuts them."""

Logits = Callable[[Int[np.ndarray, "B T"]], Float[jax.Array, "B T V"]]
"""Rows padded on the right -> next-token logits at every position."""


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
    logits: Logits,
    encode: Callable[[list[str]], Sequence[Sequence[int]]],
    *,
    pad: int,
    limit: int | None = None,
    longest: int | None = None,
    report: Callable[[TaskScore], None] = lambda _: None,
) -> CoreScore:
    """Scores every task.

    Args:
      logits: the model.
      encode: texts -> token rows, with BOS in front.
      pad: the token on the right of shorter rows.
      limit: items a task, the first of a fixed shuffle; None: all.
      longest: prompts lose their first tokens beyond so many; None: never.
      report: called with each task's score as it comes.

    Raises:
      UserError: a task has too few items for its examples, or its prompts do not fit.
    """
    tasks = [shuffled(task, limit) for task in tasks]
    for task in tasks:
        if len(task.items) <= task.fewshot:
            raise UserError(
                f"{task.label} shows {task.fewshot} examples before an item and has "
                f"only {len(task.items)} items: raise the limit or leave it out"
            )
    scores = []
    for task in tasks:
        right = [
            score_item(task, number, logits, encode, pad=pad, longest=longest).correct
            for number in range(len(task.items))
        ]
        accuracy = float(np.mean(right))
        chance = 0.01 * task.baseline
        centered = (accuracy - chance) / (1.0 - chance)
        scores.append(TaskScore(task.label, accuracy, centered, len(right)))
        report(scores[-1])
    if not scores:
        raise ValueError("score_core: there are no tasks")
    return CoreScore(float(np.mean([s.centered for s in scores])), tuple(scores))


def shuffled(task: Task, limit: int | None) -> Task:
    """Returns a task with its items in the fixed random order, at most `limit`."""
    items = list(task.items)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return dataclasses.replace(task, items=tuple(items[:limit]))


def score_item(
    task: Task,
    number: int,
    logits: Logits,
    encode: Callable[[list[str]], Sequence[Sequence[int]]],
    *,
    pad: int,
    longest: int | None = None,
) -> ItemScore:
    """Scores one item: the option of least mean loss, or an all-greedy continuation."""
    rows = [cropped(prompt, longest) for prompt in prompts(task, number, encode)]
    width = _bucket(max(len(row.ids) for row in rows), longest)
    ids = np.full((len(rows), width), pad, np.int32)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row.ids)] = row.ids
    nats, greedy = _next_tokens(logits(ids), jnp.asarray(ids))
    if task.kind == "language_modeling":
        [row] = rows
        hit = np.asarray(greedy)[0, row.start - 1 : row.end - 1]
        return ItemScore(bool(np.all(hit)), ())
    means = tuple(_mean(np.asarray(nats)[i], row) for i, row in enumerate(rows))
    return ItemScore(int(np.argmin(means)) == task.items[number]["gold"], means)


@jax.jit
def _next_tokens(
    logits: Float[jax.Array, "B T V"], ids: Int[jax.Array, "B T"]
) -> tuple[Float[jax.Array, "B T-1"], Any]:
    """Returns each next token's loss, and whether it is the likeliest one."""
    logits = logits[:, :-1].astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return nats, jnp.argmax(logits, axis=-1) == ids[:, 1:]


def _mean(nats: np.ndarray, row: Prompt) -> float:
    return float(np.mean(nats[row.start - 1 : row.end - 1]))


def _bucket(width: int, longest: int | None) -> int:
    """Rounds up, so that few widths are compiled."""
    rounded = max(16, 1 << (width - 1).bit_length())
    return width if longest is not None and rounded > longest else rounded
