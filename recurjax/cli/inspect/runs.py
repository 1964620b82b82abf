"""`recurjax runs [DIR]`: a line for each run directory, read without jax."""

import difflib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from recurjax.errors import UserError
from recurjax.files.json_files import read_json_object
from recurjax.files.metric_rows import read_rows
from recurjax.machine import terminal

_USAGE = """usage: recurjax runs [DIR]

Lists the run directories in DIR, runs/ by default: the last logged step, the last
validation loss in nats per token (the training loss where there is none), the time
since the last change and the size on disk.

example: recurjax runs experiments/sweep"""

CONFIG = "config.json"
"""The file that makes a folder a run directory."""


def run(argv: list[str]) -> int:
    """Runs the command."""
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        raise UserError(f"recurjax runs takes one folder, got {' '.join(argv)}")
    folder = Path(os.path.expanduser(argv[0] if argv else "runs"))
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}: name the folder of your runs{_hint(folder)}"
        )
    rows = [_line(root, _name(root, folder)) for root in run_directories(folder)]
    if not rows:
        raise UserError(
            f"{folder} holds no run: start one with recurjax train quickstart"
        )
    print(terminal.aligned([("run", "step", "loss", "age", "size"), *rows]))
    return 0


def run_directories(folder: Path) -> Iterator[Path]:
    """Yields the run directories at and below a folder, sorted by name."""
    if (folder / CONFIG).is_file():
        yield folder
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and child.name[0] != ".":
            yield from run_directories(child)


def find_run(path: Path) -> Path:
    """Returns a run directory.

    Raises:
      UserError: `path` is none; the message names the run with the closest name.
    """
    path = Path(os.path.expanduser(path))
    if not (path / CONFIG).is_file():
        raise UserError(f"there is no run at {path}{_hint(path)}")
    return path


def _hint(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return ""
    names = [child.name for child in folder.iterdir() if child.is_dir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f": did you mean {folder / near[0]}?" if near else ""


def _name(root: Path, folder: Path) -> str:
    return root.name if root == folder else str(root.relative_to(folder))


def _line(root: Path, name: str) -> tuple[str, ...]:
    step, loss, steps = _progress(root)
    total = "" if steps is None else f"/{steps:,}"
    reached = "imported" if (root / "imported").exists() else f"{step:,}{total}"
    changed, size = _size(root)
    return name, reached, loss, _age(time.time() - changed), _bytes(size)


def _progress(root: Path) -> tuple[int, str, int | None]:
    """Returns the last logged step, the last loss and the steps of a run."""
    steps = None
    with suppress(UserError):  # a damaged config is shown by `recurjax report`
        training: Any = read_json_object(root / CONFIG, "the config").get("training")
        steps = training.get("steps") if isinstance(training, dict) else None
    file = root / "metrics.jsonl"
    rows = read_rows(file).rows if file.is_file() else []
    step = max((row["step"] for row in rows), default=0)
    for kind, note in (("validation", ""), ("train", " (train)")):
        losses = [row.get("loss") for row in rows if row["kind"] == kind]
        if losses:
            last = losses[-1]
            return step, "not finite" if last is None else f"{last:.4f}{note}", steps
    return step, "-", steps


def _size(root: Path) -> tuple[float, int]:
    """Returns when a folder's files last changed, and their bytes."""
    changed, size = root.stat().st_mtime, 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):  # a run that trains removes old checkpoints
                status = os.lstat(os.path.join(folder, name))
                changed, size = max(changed, status.st_mtime), size + status.st_size
    return changed, size


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
