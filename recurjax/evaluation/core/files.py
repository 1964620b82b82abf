"""CORE's tasks from disk: nanochat's bundle, or one prepared JSON file a task."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from recurjax.errors import UserError
from recurjax.evaluation.core.prompts import Task, TaskType
from recurjax.files.json_files import parse_json, read_json_object

_KEYS = {
    "multiple_choice": {"query", "choices", "gold"},
    "schema": {"context_options", "continuation", "gold"},
    "language_modeling": {"context", "continuation"},
}


def read_tasks(path: Path) -> tuple[Task, ...]:
    """Reads a bundle, a folder of prepared files (`*.json`), or one such file.

    A prepared file is a JSON object with the fields of `Task`.

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


def read_bundle(directory: Path) -> tuple[Task, ...]:
    """Reads the tasks of a folder in the layout of nanochat's eval_bundle.

    core.yaml names the tasks and their files, eval_meta_data.csv the accuracies of
    guessing, eval_data/ holds the items, one JSON object a line.

    Raises:
      UserError: a file is missing or does not hold what it should.
    """
    wanted = [directory / "core.yaml", directory / "eval_meta_data.csv"]
    missing = [str(file) for file in wanted if not file.is_file()]
    if missing:
        raise UserError(f"{directory} is no CORE bundle: no {' and no '.join(missing)}")
    try:
        listed = yaml.safe_load(wanted[0].read_text(encoding="utf-8"))["icl_tasks"]
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
        with wanted[1].open(encoding="utf-8", newline="") as file:
            baselines = {
                row["Eval Task"]: float(row["Random baseline"])
                for row in csv.DictReader(file)
            }
    except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{directory} is no CORE bundle: {error!r}") from error
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{directory} lacks files of CORE: {', '.join(missing)}")
    for task in settings:
        if task["label"] not in baselines:
            raise UserError(f"{wanted[1]} has no Random baseline for {task['label']}")
    return tuple(
        _task(file, _lines(file), task | {"baseline": baselines[task["label"]]})
        for file, task in zip(files, settings, strict=True)
    )


def _prepared(file: Path) -> Task:
    try:
        content = read_json_object(file, "the CORE task")
        return _task(file, content["items"], content)
    # The reader's own sentence is better than the one below.
    except UserError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{file} is no CORE task: {error!r}") from error


def _lines(file: Path) -> list[Any]:
    try:
        # Not splitlines, to which U+2028 ends a line: JSON has it within strings.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON lines: {error}") from error
    return [parse_json(line, f"a line of {file}") for line in lines if line.strip()]


def _task(file: Path, items: Sequence[Any], settings: Mapping[str, Any]) -> Task:
    label, kind = str(settings["label"]), settings["kind"]
    if kind not in get_args(TaskType):
        raise UserError(
            f"{label} is of type {kind!r}: CORE has {', '.join(get_args(TaskType))}"
        )
    if not items:
        raise UserError(f"{file} holds no items")
    # Every item is looked at before any is scored: a fault in the last one should not
    # show after an hour.
    for number, item in enumerate(items):
        lacks = _KEYS[kind] - set(item if isinstance(item, dict) else ())
        if lacks:
            raise UserError(
                f"{file}: item {number} lacks {', '.join(sorted(lacks))}, which a "
                f"{kind} task wants"
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
    return Task(
        label=label,
        kind=kind,
        items=tuple(items),
        fewshot=fewshot,
        delimiter=settings["delimiter"],
        baseline=baseline,
    )


_MOST_EXAMPLES = 1000


def _wrong(item: Mapping[str, Any], kind: str) -> str | None:
    """Says what of an item's fields is not as its kind of task wants it."""
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
