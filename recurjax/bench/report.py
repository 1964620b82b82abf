"""Shows rows as a table and writes them as JSON."""

import dataclasses
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from recurjax.bench.timing import BenchRow
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text


def report(rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Returns {"device", "versions", "rows"} for JSON."""
    return {
        "device": device_name(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("recurjax", "jax", "jaxlib", "flax")},
        },
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def device_name() -> str:
    """Names the first device; for a CPU also its cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    # The cores that this process may use, which in a container are fewer than the
    # machine's.
    return f"cpu, {len(os.sched_getaffinity(0))} cores, {_processor()}"


def write(rows: Sequence[BenchRow], file: Path) -> None:
    """Writes the report atomically."""
    write_atomic(file, json_text(report(rows), indent=2) + "\n")


def show(rows: Sequence[BenchRow], console: Console) -> None:
    """Prints a table."""
    table = Table(title=device_name(), title_justify="left")
    for heading in ("row", "shape", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median ms", "min ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        shape = " ".join(f"{letter}{size}" for letter, size in row.shape.items())
        figures = (f"{row.median_ms:,.2f}", f"{row.min_ms:,.2f}")
        rate = f"{row.tokens_per_s:,.0f}"
        table.add_row(row.name, shape, row.dtype, *figures, rate)
    console.print(table)


def _processor() -> str:
    # Python names only the architecture on Linux; this file names the model.
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
