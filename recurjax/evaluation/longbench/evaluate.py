"""A model's answers to LongBench's items, scored in LongBench's way and in RAT's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recurjax.data.packing import without_middle
from recurjax.errors import UserError
from recurjax.evaluation.answerer import GREEDY, Question
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.longbench.metrics import best_score
from recurjax.evaluation.longbench.tasks import TASKS, LongBenchTask
from recurjax.evaluation.rows import Row, mean_and_error

PENALTY = replace(GREEDY, repetition_penalty=1.2)
"""Of summaries, RAT's: models that were only pretrained repeat themselves there. It
counts the prompt's tokens too, as the term is used elsewhere; RAT's only new ones."""


class Item(NamedTuple):
    """A document, what is asked of it, and what may be answered."""

    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def read_longbench(directory: Path) -> dict[str, list[Item]]:
    """Reads the English tasks of LongBench's folder `data`, by their names.

    Raises:
      UserError: there is none, or a line has another format.
    """
    if not directory.is_dir():
        raise UserError(f"--longbench: there is no directory {directory}")
    files = {name: directory / f"{name}.jsonl" for name in TASKS}
    found = {name: _read(file) for name, file in files.items() if file.is_file()}
    if not found:
        raise UserError(
            f"--longbench: {directory} has none of LongBench's English files, such as "
            "narrativeqa.jsonl: unpack its data.zip and name the folder data"
        )
    return found


def evaluate_longbench(
    evaluator: Evaluator, tasks: Mapping[str, Sequence[Item]], *, limit: int | None
) -> list[Row]:
    """Answers greedily and scores.

    A prompt that does not fit into the window beside its answer loses its middle.
    Summaries are written under RAT's repetition penalty.

    Args:
      evaluator: the model; its window holds a prompt and its answer.
      tasks: from `read_longbench`.
      limit: items a task, the first ones; None: all.

    Returns:
      Of each task the metric of the answers as RAT cuts them, and, as
      `<metric>_longbench`, as LongBench does.

    Raises:
      UserError: the window is too short for an answer, or a package is missing.
    """
    rows = []
    for name, items in tasks.items():
        task, chosen = TASKS[name], items[:limit]
        best_score(task.metric, "a", ["a"], ["a"])  # a missing package is told first
        questions = [question(evaluator, task, item) for item in chosen]
        said = evaluator.answers(questions, name=name)
        # Both figures are of the same answers: only where these end differs.
        cuts = {task.metric: rat_cut, f"{task.metric}_longbench": longbench_cut}
        for metric, cut in cuts.items():
            values = [
                best_score(task.metric, cut(task, text), item.answers, item.classes)
                for text, item in zip(said, chosen, strict=True)
            ]
            mean, error = mean_and_error(values)
            settings: dict[str, Any] = {"tokens": evaluator.window}
            if task.summary:
                settings["repetition_penalty"] = PENALTY.repetition_penalty
            row = Row(
                step=evaluator.step,
                task=f"longbench/{name}",
                metric=metric,
                value=mean,
                stderr=error,
                n=len(values),
                limit=limit,
                package=_rouge() if task.metric == "rouge_l" else None,
                settings=settings,
            )
            rows.append(row)
    return rows


def question(evaluator: Evaluator, task: LongBenchTask, item: Item) -> Question:
    """Writes the prompt and cuts its middle, so that it fits beside the answer.

    Raises:
      UserError: not even the answer fits.
    """
    # Not str.format: a context may be code, with braces of its own.
    text = task.prompt.replace("{input}", item.input, 1)
    text = text.replace("{context}", item.context, 1)
    room = evaluator.window - task.most
    if room < 2:
        raise UserError(
            f"a window of {evaluator.window} tokens has no room for a prompt beside "
            f"{task.most} new tokens: set --length to more"
        )
    prompt = without_middle(np.array(evaluator.context(text), np.int32), room)
    sampling = PENALTY if task.summary else GREEDY
    return Question(tuple(prompt.tolist()), task.most, (), sampling)


def rat_cut(task: LongBenchTask, answer: str) -> str:
    """Ends an answer where RAT's evaluation does."""
    if task.ends is None:
        return answer
    answer = answer.lstrip("\n")
    for end in task.ends:
        answer = answer.split(end)[0]
    return answer


def longbench_cut(task: LongBenchTask, answer: str) -> str:
    """Ends an answer where LongBench's own does: some after a line, others nowhere."""
    return answer.lstrip("\n").split("\n")[0] if task.one_line else answer


def _read(file: Path) -> list[Item]:
    items = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    items.append(_item(json.loads(line), f"{file}, line {number}"))
    except (OSError, ValueError) as error:
        # A UserError is a ValueError too, and its sentence names the line.
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is not a file of JSON lines: {error}") from error
    if not items:
        raise UserError(f"{file} has no items")
    return items


def _item(row: Any, where: str) -> Item:
    known = row if isinstance(row, dict) else {}
    context, asked, answers = (known.get(n) for n in ("context", "input", "answers"))
    texts = isinstance(context, str) and isinstance(asked, str)
    if not (texts and isinstance(answers, list) and answers):
        raise UserError(
            f"{where} is no item of LongBench, which has context, input and answers"
        )
    classes = known.get("all_classes") or ()
    return Item(str(context), str(asked), tuple(map(str, answers)), tuple(classes))


def _rouge() -> str | None:
    try:
        return f"rouge {version('rouge')}"
    except PackageNotFoundError:
        return None
