"""CORE's prompts: few-shot texts of an item, and which tokens of them are scored."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from recurjax.errors import UserError

TaskType = Literal["multiple_choice", "schema", "language_modeling"]

FEWSHOT_SEED = 1234
"""An item's examples are drawn by Random(1234 + its number)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task of the suite.

    Attributes:
      label: its name.
      kind: "multiple_choice": one query, options after it; "schema": options before one
        continuation; "language_modeling": one continuation, to be predicted greedily.
      items: rows with query, choices, gold; context_options, continuation, gold; or
        context, continuation.
      fewshot: solved examples before each item.
      delimiter: between what is asked and what continues it.
      baseline: accuracy of guessing, in percent.
    """

    label: str
    kind: TaskType
    items: tuple[dict[str, Any], ...]
    fewshot: int
    delimiter: str
    baseline: float


class Prompt(NamedTuple):
    """A text as tokens, BOS first, and the half-open span of those that are scored."""

    ids: list[int]
    start: int
    end: int


def fewshot_numbers(task: Task, number: int) -> list[int]:
    """Returns which items stand before item `number` as solved examples."""
    others = [other for other in range(len(task.items)) if other != number]
    # Each item draws its examples by itself: leaving items out does not change others.
    return random.Random(FEWSHOT_SEED + number).sample(others, task.fewshot)


def texts(task: Task, number: int) -> list[str]:
    """Returns an item's texts: one an option, or without and with the continuation."""
    before = "".join(
        _solved(task, task.items[example]) + "\n\n"
        for example in fewshot_numbers(task, number)
    )
    item = task.items[number]
    match task.kind:
        case "multiple_choice":
            stem = before + item["query"] + task.delimiter
            return [stem + choice for choice in item["choices"]]
        case "schema":
            end = task.delimiter + item["continuation"]
            return [before + option + end for option in item["context_options"]]
        case "language_modeling":
            stem = before + item["context"].strip() + task.delimiter
            # Without its last blank, which many tokenizers join to the next word.
            return [stem.strip(), stem + item["continuation"]]


def prompts(
    task: Task, number: int, encode: Callable[[list[str]], Sequence[Sequence[int]]]
) -> list[Prompt]:
    """Returns an item's token rows and what is scored of each.

    Options differ in a suffix ("multiple_choice"): it is scored, to each one's end; or
    have one in common ("schema"): it is scored. Of language modeling, the tokens that
    the continuation adds.

    Args:
      encode: texts -> token rows, with BOS in front.

    Raises:
      UserError: a continuation changes the tokens before it.
    """
    rows = [list(row) for row in encode(texts(task, number))]
    match task.kind:
        case "multiple_choice":
            # All options begin alike; where the first of them differ, scoring starts.
            start = _common(rows)
            return [Prompt(row, start, len(row)) for row in rows]
        case "schema":
            # Read backwards: what the rows have in common at their end is the
            # continuation.
            shared = _common([row[::-1] for row in rows])
            return [Prompt(row, len(row) - shared, len(row)) for row in rows]
        case "language_modeling":
            without, whole = rows
            # A tokenizer may join the last word of the context to the continuation:
            # then no span of tokens is the continuation alone.
            if whole[: len(without)] != without or len(whole) == len(without):
                raise UserError(
                    f"prompts: item {number} of {task.label}: the continuation changes "
                    "the tokens before it"
                )
            return [Prompt(whole, len(without), len(whole))]


def cropped(prompt: Prompt, longest: int | None) -> Prompt:
    """Drops the first tokens of a prompt longer than `longest`.

    Raises:
      UserError: some of what is scored would go too, or have nothing before it.
    """
    excess = 0 if longest is None else max(len(prompt.ids) - longest, 0)
    # The token before the first scored one has to stay: its state makes the score.
    if excess and excess >= prompt.start:
        raise UserError(
            f"cropped: {longest} tokens leave out part of what is scored, which begins "
            f"at {prompt.start} of {len(prompt.ids)}"
        )
    return Prompt(prompt.ids[excess:], prompt.start - excess, prompt.end - excess)


def _solved(task: Task, item: dict[str, Any]) -> str:
    match task.kind:
        case "multiple_choice":
            return item["query"] + task.delimiter + item["choices"][item["gold"]]
        case "schema":
            context = item["context_options"][item["gold"]]
            return context + task.delimiter + item["continuation"]
        case "language_modeling":
            return item["context"].strip() + task.delimiter + item["continuation"]


def _common(rows: list[list[int]]) -> int:
    """Counts the leading tokens that all rows have in common."""
    shortest = min(len(row) for row in rows)
    for place in range(shortest):
        if len({row[place] for row in rows}) > 1:
            return place
    return shortest
