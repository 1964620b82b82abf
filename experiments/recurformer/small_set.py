"""What the small sets share: figures of a finished run, and their table."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from recurjax.training.run import RunDirectory


def last_validation(root: Path) -> dict[str, float]:
    """Reads the last validation row of a run."""
    lines = RunDirectory(root).metrics.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["kind"] == "validation"][-1]


def table_of(what: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Returns a Markdown table: a row a name, mean over seeds and (lowest, highest)."""
    columns = list(dict.fromkeys(c for rows in found.values() for c in rows[0]))
    lines = [
        f"| {what} | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, seeds in found.items():
        cells = []
        for column in columns:
            values = [row[column] for row in seeds if column in row]
            if not values:
                cells.append("")
                continue
            spread = f" ({min(values):.3f}, {max(values):.3f})" if values[1:] else ""
            cells.append(f"{statistics.fmean(values):.3f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
