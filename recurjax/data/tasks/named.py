"""The tasks by the names that a command line knows, with the papers' settings."""

import difflib
from dataclasses import replace

from recurjax.data.tasks.copying import Copy
from recurjax.data.tasks.dataset import TaskConfig
from recurjax.data.tasks.hash_hop import HashHop
from recurjax.data.tasks.mad import (
    BASELINES,
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    SelectiveCopying,
)
from recurjax.data.tasks.mqar import Mqar, Setting
from recurjax.data.tasks.needles import Needles
from recurjax.data.tasks.state_tracking import StateTracking
from recurjax.errors import UserError

NAMED: dict[str, TaskConfig] = {
    "mqar": Mqar(),
    "hash_hop": HashHop(),
    "hash_hop_full": HashHop(chains="full"),
    "copy": Copy(),
    "needles": Needles(),
    "parity": StateTracking(group="parity"),
    "s3": StateTracking(group="S3"),
    "s5": StateTracking(group="S5"),
    **{f"mad_{name}": task for name, task in BASELINES.items()},
}
"""Each task as its source tests it."""


def check_named(name: str) -> None:
    """Raises UserError for a name that is none of the tasks."""
    if name in NAMED:
        return
    near = difflib.get_close_matches(name.lower(), NAMED, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMED)}"
    raise UserError(f"there is no task {name}: {hint}")


def name_of(task: TaskConfig) -> str:
    """Returns the name of a task, whatever its sizes."""
    match task:
        case Mqar():
            return "mqar"
        case HashHop():
            return "hash_hop" if task.chains == "one" else "hash_hop_full"
        case Copy():
            return "copy"
        case Needles():
            return "needles"
        case StateTracking():
            return task.group.lower()
        case InContextRecall():
            return "mad_noisy_recall" if task.noise else "mad_in_context_recall"
        case FuzzyRecall():
            return "mad_fuzzy_recall"
        case Memorization():
            return "mad_memorization"
        case SelectiveCopying():
            return "mad_selective_copying"
        case Compression():
            return "mad_compression"


def limited(task: TaskConfig, rows: int | None) -> TaskConfig:
    """Returns the task with at most so many rows to test on, of each setting."""
    if rows is None:
        return task
    if isinstance(task, Mqar):
        settings = tuple(
            Setting(one.length, one.pairs, min(one.rows, rows))
            for one in task.validation
        )
        return replace(task, validation=settings)
    return replace(task, validation_rows=min(task.validation_rows, rows))
