"""CORE: in-context learning over many tasks, scored as nanochat does."""

from recurjax.evaluation.core.files import read_tasks
from recurjax.evaluation.core.model import (
    ZERO_MEMORY,
    as_json,
    core_of,
    markdown,
    rows,
)
from recurjax.evaluation.core.score import TaskScore

__all__ = [
    "TaskScore",
    "ZERO_MEMORY",
    "as_json",
    "core_of",
    "markdown",
    "read_tasks",
    "rows",
]
