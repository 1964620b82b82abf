"""Synthetic tasks: rows made from numbers, one file a paper."""

from recurjax.data.tasks.copying import Copy
from recurjax.data.tasks.dataset import TaskConfig, TaskData, TaskDataset
from recurjax.data.tasks.hash_hop import HashHop
from recurjax.data.tasks.mad import (
    Compression,
    FuzzyRecall,
    InContextRecall,
    Memorization,
    SelectiveCopying,
)
from recurjax.data.tasks.mqar import Mqar, Setting
from recurjax.data.tasks.needles import Needles
from recurjax.data.tasks.rows import RowLabels, Split, TaskRow, row_of
from recurjax.data.tasks.state_tracking import StateTracking

__all__ = [
    "Compression",
    "Copy",
    "FuzzyRecall",
    "HashHop",
    "InContextRecall",
    "Memorization",
    "Mqar",
    "Needles",
    "RowLabels",
    "TaskRow",
    "SelectiveCopying",
    "Setting",
    "Split",
    "StateTracking",
    "TaskConfig",
    "TaskData",
    "TaskDataset",
    "row_of",
]
