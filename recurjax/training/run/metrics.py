"""Where metrics go: metrics.jsonl, TensorBoard and, if asked, Weights & Biases."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.errors import UserError


class Rows(NamedTuple):
    """What metrics.jsonl holds.

    Attributes:
      rows: in the file's order, each with "step" and "kind".
      damaged: how many lines are none; a last one that a kill cut off is not counted.
    """

    rows: list[dict[str, Any]]
    damaged: int


def read_rows(file: Path) -> Rows:
    """Reads metrics.jsonl, leaving out lines that are no rows.

    A power cut can leave zeros, a disk another byte: that costs its line and no other.
    """
    rows, damaged = [], 0
    # Not splitlines: a byte may have become another that ends lines.
    *lines, last = file.read_bytes().split(b"\n")
    for line in lines:
        row = _row(line)
        if row is None:
            damaged += 1
        else:
            rows.append(row)
    if (row := _row(last)) is not None:
        rows.append(row)
    return Rows(rows, damaged)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(row, dict) and type(row.get("step")) is int:
        return row if isinstance(row.get("kind"), str) else None
    return None


class MetricsWriter:
    """Appends rows to metrics.jsonl and the other places; made by process 0 only.

    A row is {"step": n, "kind": "train" or "validation", metric: number, ...}; a number
    that is not finite is written as null, which is what JSON has.
    """

    def __init__(
        self,
        file: Path,
        tensorboard: Path,
        *,
        resumed_from: int,
        wandb_project: str | None = None,
        run_name: str = "",
    ):
        # Imported here: TensorBoard's writer brings protobuf in, which users of the
        # library alone need not wait for.
        from tensorboardX import SummaryWriter

        self._file = file.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(tensorboard), purge_step=resumed_from + 1)
        self._wandb = _start_wandb(wandb_project, run_name)

    def write(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Writes one row."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, "kind": kind, **finite}) + "\n")
        for name, value in metrics.items():
            if not math.isfinite(value):
                continue
            self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
        if self._wandb is not None:
            row = {f"{kind}/{name}": value for name, value in metrics.items()}
            self._wandb.log(row, step=step)

    def flush(self) -> None:
        """Makes all rows visible to readers of the files, also after a power cut."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._tensorboard.flush()

    def close(self) -> None:
        """Flushes and closes."""
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(project: str | None, name: str) -> Any:
    if project is None:
        return None
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "training.wandb_project needs wandb: pip install 'recurjax[wandb]'"
        ) from error
    return wandb.init(project=project, name=name, id=name, resume="allow")
