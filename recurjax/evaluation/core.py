"""CORE: in-context learning over many tasks, scored as nanochat does (DCLM's suite).

`read_tasks` reads nanochat's bundle, or one prepared JSON file per task. `core_of`
scores a model in each way that it can read. Below: `score_core` centers accuracies,
`score_items` scores a task, and `prompts` writes the few-shot texts of an item and says
which of its tokens are scored.
"""

import csv
import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import yaml
from jax.sharding import Mesh
from jaxtyping import Float

from recurjax.data.tokenizers import Tokenizer, first_token
from recurjax.errors import UserError
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.progress import progress_bar
from recurjax.evaluation.rows import Row, share_error
from recurjax.evaluation.scorer import (
    EXACT,
    Pair,
    PairScore,
    Reading,
    Score,
    Scorer,
)
from recurjax.files.json_files import parse_json, read_json_object
from recurjax.model import Decoder, as_latent_memory
from recurjax.types import Array, Tokens

TaskType = Literal["multiple_choice", "schema", "language_modeling"]

FEWSHOT_SEED = 1234
"""An item's examples are drawn by Random(1234 + its number)."""

SHUFFLE_SEED = 1337
"""Of a task's items, before a limit cuts them."""

AS_CALLED = "core"
"""The model as it is called: of a latent memory, the exact recurrence."""

ZERO_MEMORY = "core_zero_memory"
"""A latent memory's parallel pass without it."""

_KEYS = {
    "multiple_choice": {"query", "choices", "gold"},
    "schema": {"context_options", "continuation", "gold"},
    "language_modeling": {"context", "continuation"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreTask:
    """One task of the suite.

    Attributes:
      label: its name.
      kind: "multiple_choice": one query, options after it; "schema": options before one
        continuation; "language_modeling": one continuation, to be predicted greedily.
      items: rows with query, choices, gold; context_options, continuation, gold; or
        context, continuation.
      fewshot: solved examples before each item.
      delimiter: between the query and its continuation.
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


class TaskScore(NamedTuple):
    """Accuracy of a task, and its centered accuracy: 0 is chance, 1 is perfect."""

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


def core_of(
    model: Decoder,
    tokenizer: Tokenizer,
    tasks: Iterable[CoreTask],
    *,
    limit: int | None = None,
    mesh: Mesh | None = None,
    rows: int = 16,
    report: Callable[[str, TaskScore], None] = lambda reading, score: None,
    journal: Journal | None = None,
) -> dict[str, CoreScore]:
    """Scores a model in each way that it can read.

    Args:
      model: any variant.
      tokenizer: its BOS, or else its EOS, precedes each prompt.
      tasks: see `read_tasks`.
      limit: items a task; None: all.
      mesh: mesh that holds the model; None: one device.
      rows: read at a time.
      report: called with the reading and each of its tasks' scores.
      journal: keeps the pairs' scores; None: nothing does.

    Returns:
      The score under `AS_CALLED` and, of a model with a latent memory, also under
      `ZERO_MEMORY`.

    Raises:
      UserError: the tokenizer has neither BOS nor EOS; or as `score_core`.
    """
    first = first_token(tokenizer)
    if first is None:
        raise UserError(
            "CORE puts a BOS token before each prompt, and the tokenizer has "
            "none: use a run whose tokenizer has BOS"
        )

    def encode(texts: list[str]) -> list[list[int]]:
        # Every prompt begins as a document does, whatever it continues.
        return [[first, *ids.tolist()] for ids in tokenizer.encode_many(texts)]

    def scores(reading: Reading, pairs: Sequence[Pair]) -> list[PairScore]:
        with progress_bar(f"CORE ({reading.name})", len(pairs)) as done:
            scorer = Scorer(
                model=model, mesh=mesh, rows=rows, reading=reading, report=done
            )
            return scorer(pairs, journal)

    tasks = tuple(tasks)
    readings = {AS_CALLED: EXACT}
    # A latent memory can be left out: the pass without it shows what it is worth.
    if as_latent_memory(model.stack) is not None:
        readings[ZERO_MEMORY] = Reading("zero_memory", _without_memory)
    return {
        name: score_core(
            tasks,
            partial(scores, reading),
            encode,
            limit=limit,
            longest=model.config.max_length,
            report=lambda score, name=name: report(name, score),
        )
        for name, reading in readings.items()
    }


def _without_memory(model: Decoder, tokens: Tokens) -> Float[Array, "B T D"]:
    stack = as_latent_memory(model.stack)
    assert stack is not None
    return model.final_norm(stack.without_memory(model.embed(tokens.ids), tokens))


def as_json(scores: Mapping[str, CoreScore]) -> dict[str, Any]:
    """Returns each reading's CORE and its tasks, as plain values."""
    return {
        name: {"core": score.core, "tasks": [task._asdict() for task in score.tasks]}
        for name, score in scores.items()
    }


def markdown(scores: Mapping[str, CoreScore]) -> str:
    """Returns a table with a row per task, and CORE as the last one.

    Of each reading it has the accuracy and, after it, the centered accuracy.
    """
    heads = "".join(f" {name} | centered |" for name in scores)
    lines = [f"| task | items |{heads}", "|---|---|" + "---|---|" * len(scores)]
    # Task by task, over all readings: their tasks come in one order.
    for row in zip(*(score.tasks for score in scores.values()), strict=True):
        columns = "".join(
            f" {task.accuracy:.4f} | {task.centered:.4f} |" for task in row
        )
        lines.append(f"| {row[0].label} | {row[0].items} |{columns}")
    columns = "".join(f" | {score.core:.4f} |" for score in scores.values())
    return "\n".join([*lines, f"| CORE | |{columns}"]) + "\n"


def rows(scores: Mapping[str, CoreScore], *, step: int, limit: int | None) -> list[Row]:
    """Returns each task's accuracy and each reading's CORE as rows to keep."""
    rows = []
    for name, score in scores.items():
        common = {"step": step, "limit": limit, "settings": {"reading": name}}
        for task in score.tasks:
            error = share_error(task.accuracy, task.items)
            for metric, value, stderr in (
                # A centered accuracy's error would need the chance level's own.
                ("accuracy", task.accuracy, error),
                ("centered", task.centered, None),
            ):
                row = Row(
                    task=task.label,
                    metric=metric,
                    value=value,
                    stderr=stderr,
                    n=task.items,
                    **common,
                )
                rows.append(row)
        # CORE is over tasks; its n counts the items that went into it.
        items = sum(task.items for task in score.tasks)
        rows.append(
            Row(task="CORE", metric="core", value=score.core, n=items, **common)
        )
    return rows


def score_core(
    tasks: Iterable[CoreTask],
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
      longest: longer prompts lose their first tokens; None: never.
      report: called with each task's score as it comes.

    Raises:
      UserError: a task has too few items for its examples, or its prompts do not fit.
    """
    tasks = [shuffled(task, limit) for task in tasks]
    for task in tasks:
        # An item is never one of its own examples.
        if len(task.items) <= task.fewshot:
            raise UserError(
                f"{task.label} shows {task.fewshot} examples before an item and "
                f"has only {len(task.items)} items: raise --limit or leave it out"
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
        raise ValueError("score_core: tasks must name at least one")
    return CoreScore(float(np.mean([s.centered for s in scores])), tuple(scores))


def shuffled(task: CoreTask, limit: int | None) -> CoreTask:
    """Returns a task with its items in the fixed random order, at most `limit`."""
    items = list(task.items)
    # A separate generator: Python's global one may have another seed.
    random.Random(SHUFFLE_SEED).shuffle(items)
    return dataclasses.replace(task, items=tuple(items[:limit]))


def score_items(
    task: CoreTask,
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
    # One call for all pairs, because the scorer sorts them by length.
    scored = iter(score(pairs))
    items = []
    for number, item in enumerate(rows):
        choices = [next(scored) for _ in item]
        if task.kind == "language_modeling":
            items.append(ItemScore(choices[0].greedy, ()))
            continue
        # The mean over tokens, not the sum: options differ in length.
        means = tuple(float(np.mean(choice.nats)) for choice in choices)
        right = int(np.argmin(means)) == task.items[number]["gold"]
        items.append(ItemScore(right, means))
    return items


def fewshot_numbers(task: CoreTask, number: int) -> list[int]:
    """Returns which items stand before item `number` as solved examples."""
    others = [other for other in range(len(task.items)) if other != number]
    # Each item draws its examples by itself: leaving items out does not change others.
    return random.Random(FEWSHOT_SEED + number).sample(others, task.fewshot)


def texts(task: CoreTask, number: int) -> list[str]:
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
    task: CoreTask, number: int, encode: Callable[[list[str]], Sequence[Sequence[int]]]
) -> list[Prompt]:
    """Returns an item's token rows and what is scored of each.

    Options differ in a suffix ("multiple_choice"): it is scored, to each one's end; or
    have one in common ("schema"): it is scored. Of language modeling, the tokens that
    the continuation adds, and one that reaches over the join.

    Args:
      encode: texts -> token rows, with BOS in front.

    Raises:
      UserError: a continuation adds no token.
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
            without, full = rows
            # A token may reach over the join: it is scored with the continuation.
            start = _common([without, full])
            if start == len(full):
                raise UserError(
                    f"prompts: item {number} of {task.label}: the continuation adds no "
                    "token to its context"
                )
            return [Prompt(full, start, len(full))]


def cropped(prompt: Prompt, longest: int | None) -> Prompt:
    """Drops the first tokens of a prompt longer than `longest`.

    Raises:
      UserError: some of what is scored would go too, or have nothing before it.
    """
    excess = 0 if longest is None else max(len(prompt.ids) - longest, 0)
    # The token before the first scored one has to stay: its state makes the score.
    if excess and excess >= prompt.start:
        raise UserError(
            f"cropped: the last {longest} tokens of the prompt must contain "
            f"all that is scored, which begins at {prompt.start} of "
            f"{len(prompt.ids)}: raise longest"
        )
    return Prompt(prompt.ids[excess:], prompt.start - excess, prompt.end - excess)


def _solved(task: CoreTask, item: dict[str, Any]) -> str:
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


def read_tasks(path: Path) -> tuple[CoreTask, ...]:
    """Reads a bundle, a folder of prepared files (`*.json`), or one such file.

    A prepared file is a JSON object with the fields of `CoreTask`.

    Raises:
      UserError: a file is missing or does not hold what it should.
    """
    if path.is_file():
        return (_prepared(path),)
    if not path.is_dir():
        raise UserError(f"there is no CORE bundle or task file at {path}")
    files = sorted(path.glob("*.json"))
    # nanochat's layout has core.yaml; a folder without any JSON gets that layout's
    # error, which names what is missing.
    if (path / "core.yaml").exists() or not files:
        return read_bundle(path)
    return tuple(_prepared(file) for file in files)


def read_bundle(directory: Path) -> tuple[CoreTask, ...]:
    """Reads the tasks of a folder in the layout of nanochat's eval_bundle.

    core.yaml names the tasks and their files, eval_meta_data.csv the accuracies of
    guessing, eval_data/ holds the items, one JSON object per line.

    Raises:
      UserError: a file is missing or does not hold what it should.
    """
    required = [directory / "core.yaml", directory / "eval_meta_data.csv"]
    missing = [str(file) for file in required if not file.is_file()]
    if missing:
        raise UserError(
            f"{directory} is not a CORE bundle: it has no {' and no '.join(missing)}"
        )
    try:
        listed = yaml.safe_load(required[0].read_text(encoding="utf-8"))["icl_tasks"]
        files = [directory / "eval_data" / task["dataset_uri"] for task in listed]
        settings = [
            {
                "label": task["label"],
                "kind": task["icl_task_type"],
                # The file lists several numbers of examples; nanochat uses the first.
                "fewshot": task["num_fewshot"][0],
                "delimiter": task.get("continuation_delimiter", " "),
            }
            for task in listed
        ]
        with required[1].open(encoding="utf-8", newline="") as file:
            baselines = {
                row["Eval Task"]: float(row["Random baseline"])
                for row in csv.DictReader(file)
            }
    except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{directory} is not a CORE bundle: {error!r}") from error
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{directory} is an incomplete CORE bundle: it lacks {', '.join(missing)}"
        )
    for task in settings:
        if task["label"] not in baselines:
            raise UserError(f"{required[1]} has no Random baseline for {task['label']}")
    return tuple(
        _task(file, _lines(file), task | {"baseline": baselines[task["label"]]})
        for file, task in zip(files, settings, strict=True)
    )


def _prepared(file: Path) -> CoreTask:
    try:
        content = read_json_object(file, "the CORE task")
        return _task(file, content["items"], content)
    # The reader's own sentence is better than the one below.
    except UserError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a CORE task: {error!r}") from error


def _lines(file: Path) -> list[Any]:
    try:
        # Not splitlines, to which U+2028 ends a line: JSON has it within strings.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON lines: {error}") from error
    return [parse_json(line, f"a line of {file}") for line in lines if line.strip()]


def _task(file: Path, items: Sequence[Any], settings: Mapping[str, Any]) -> CoreTask:
    label, kind = str(settings["label"]), settings["kind"]
    if kind not in get_args(TaskType):
        raise UserError(
            f"{label}: the task's type must be one of "
            f"{', '.join(get_args(TaskType))}, got {kind!r}"
        )
    if not items:
        raise UserError(f"{file} holds no items: name a task file with at least one")
    # Every item is looked at before any is scored: a fault in the last one should not
    # show after an hour.
    for number, item in enumerate(items):
        lacks = _KEYS[kind] - set(item if isinstance(item, dict) else ())
        if lacks:
            raise UserError(
                f"{file}: item {number} lacks {', '.join(sorted(lacks))}, which a "
                f"{kind} task needs"
            )
        if wrong := _wrong(item, kind):
            raise UserError(f"{file}: item {number}: {wrong}")
    fewshot, baseline = settings["fewshot"], float(settings["baseline"])
    if type(fewshot) is not int or not 0 <= fewshot <= _MOST_EXAMPLES:
        raise UserError(
            f"{file}: fewshot must be 0 to {_MOST_EXAMPLES}, got {fewshot!r:.60}"
        )
    if not 0 <= baseline <= 100:
        raise UserError(
            f"{file}: baseline must be an accuracy of 0 to 100 %, got {baseline}"
        )
    if not isinstance(settings["delimiter"], str):
        raise UserError(f"{file}: delimiter must be a string")
    return CoreTask(
        label=label,
        kind=kind,
        items=tuple(items),
        fewshot=fewshot,
        delimiter=settings["delimiter"],
        baseline=baseline,
    )


_MOST_EXAMPLES = 1000


def _wrong(item: Mapping[str, Any], kind: str) -> str | None:
    """Returns what of an item's fields is not as its kind of task wants it."""
    lists = {"multiple_choice": "choices", "schema": "context_options"}
    for name in sorted(_KEYS[kind] - {"gold", *lists.values()}):
        if not isinstance(item[name], str):
            return f"{name} must be a string, got {item[name]!r:.60}"
    if kind not in lists:
        return None
    options, gold = item[lists[kind]], item["gold"]
    if not isinstance(options, list) or not options:
        return f"{lists[kind]} must be a list of strings, got {options!r:.60}"
    if not all(isinstance(option, str) for option in options):
        return f"{lists[kind]} must be strings, got {options!r:.60}"
    if type(gold) is not int or not 0 <= gold < len(options):
        return (
            f"gold must be 0 to {len(options) - 1}, the place of one of {lists[kind]}, "
            f"got {gold!r:.60}"
        )
    return None
