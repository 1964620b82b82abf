"""The rows of a run's metrics.jsonl, read without jax."""

from pathlib import Path
from typing import Any, NamedTuple

from recurjax.errors import UserError
from recurjax.files.json_files import parse_json


class MetricRows(NamedTuple):
    """The rows of metrics.jsonl.

    Attributes:
      rows: in the file's order, each with "step" and "kind".
      damaged: how many lines are none; a last one that a kill cut off is not counted.
    """

    rows: list[dict[str, Any]]
    damaged: int


def read_rows(file: Path) -> MetricRows:
    """Reads metrics.jsonl, leaving out lines that are not rows.

    A power cut can leave zeros, a disk another byte: that costs its line and no other.
    """
    rows, damaged = [], 0
    # Not splitlines: a damaged byte may have become another that ends lines. The last
    # piece is empty, or what a kill cut off.
    *lines, last = file.read_bytes().split(b"\n")
    for line in lines:
        row = _row(line)
        if row is None:
            damaged += 1
        else:
            rows.append(row)
    # A last row without its line break may still be complete.
    if (row := _row(last)) is not None:
        rows.append(row)
    return MetricRows(rows, damaged)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line, "a row")
    except UserError:
        return None
    if not isinstance(row, dict):
        return None
    step, kind = row.get("step"), row.get("kind")
    if type(step) is not int or step < 0 or not isinstance(kind, str):
        return None
    # Whoever reads a row draws or compares what it holds.
    figures = [value for name, value in row.items() if name != "kind"]
    numeric = all(value is None or isinstance(value, int | float) for value in figures)
    return row if numeric else None
