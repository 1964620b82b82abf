"""Results of a run's evaluations: rows of `evaluations.jsonl`, and their table."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import parse_json
from recurjax.files.storage import open_store, url_of

FILE = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One result of an evaluation.

    Attributes:
      step: step of the checkpoint.
      task: its name.
      metric, value: the figure and its name.
      n: how many items (of a text: tokens) it is the mean of.
      stderr: its standard error; None: not known.
      limit: the most items to evaluate; None: all.
      seed: seed of the sampling; None: no sampling.
      version: version of the task.
      package: the package that defines the task or has its data, with its version.
      floor: accuracy of the best answer that matches no keys.
      settings: whatever else changes the figure: examples shown, tokens per row.
    """

    step: int
    task: str
    metric: str
    value: float
    n: int
    stderr: float | None = None
    limit: int | None = None
    seed: int | None = None
    version: str | None = None
    package: str | None = None
    floor: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def append_rows(run: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a run's file: all of them, or none where the disk is full."""
    lines = "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
    if (url := url_of(run)) is not None:
        store = open_store(url, write=True)
        before = b"" if store.size(FILE) is None else store.read(FILE)
        store.write(FILE, before + lines.encode())
        return
    file = run / FILE
    before = file.read_bytes() if file.is_file() else b""
    # Half a line at the end would make all rows unreadable.
    write_atomic(file, before + lines.encode())


def read_rows(run: Path) -> list[Row]:
    """Reads a run's rows.

    Raises:
      UserError: there are none, or one is of another format.
    """
    url, file = url_of(run), run / FILE
    text = None
    if url is not None:
        store = open_store(url)
        text = None if store.size(FILE) is None else store.read(FILE)
    elif file.is_file():
        text = file.read_bytes()
    if text is None:
        where = url or run
        raise UserError(
            f"{where} has no {FILE}: evaluate it first, as in recurjax evaluate {where}"
        )
    rows = []
    for number, line in enumerate(text.splitlines()):
        try:
            row = Row(**parse_json(line, "a row"))
            # `type` where a bool would pass for an int.
            if not isinstance(row.value, int | float) or type(row.step) is not int:
                raise TypeError("a figure is a number")
            rows.append(row)
        except (UserError, TypeError) as error:
            raise UserError(
                f"{file}, line {number + 1} is not a row of an evaluation: remove it"
            ) from error
    return rows


def newest(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows; of figures that were measured twice the newest."""
    latest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row.step, row.task, row.metric, row.limit, row.seed, settings_of(row))
        latest.pop(key, None)  # so that the newest comes last
        latest[key] = row
    return list(latest.values())


def markdown(rows: Iterable[Row]) -> str:
    """Returns a table; of figures that were measured twice the newest."""
    lines = [
        "| task | metric | value | stderr | n | step | settings | version |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in newest(rows):
        error = "" if row.stderr is None else f"{row.stderr:.4f}"
        floor = "" if row.floor is None else f" (floor {row.floor:.4f})"
        version = ", ".join(
            part for part in (row.version and f"v{row.version}", row.package) if part
        )
        lines.append(
            f"| {row.task} | {row.metric} | {row.value:.4f}{floor} | {error} | "
            f"{row.n:,} | {row.step} | {settings_of(row)} | {version} |"
        )
    return "\n".join(lines) + "\n"


def share_error(share: float, n: int) -> float | None:
    """Returns the standard error of a mean of n zeros and ones; None of one."""
    # The unbiased variance of n zeros and ones, over n.
    return (share * (1 - share) / (n - 1)) ** 0.5 if n > 1 else None


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Returns a mean and its standard error; None of one value."""
    mean, n = sum(values) / len(values), len(values)
    if n == 1:
        return mean, None
    # The unbiased variance, over n - 1; the mean of n values varies by 1/n of it.
    spread = sum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, (spread / n) ** 0.5


def settings_of(row: Row) -> str:
    """Returns all that makes a figure another one: of equal ones the newest counts."""
    settings = dict(row.settings)
    if row.limit is not None:
        settings["limit"] = row.limit
    if row.seed is not None:
        settings["seed"] = row.seed
    return ", ".join(f"{name} {value}" for name, value in settings.items())
