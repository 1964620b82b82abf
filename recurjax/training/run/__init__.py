"""A run on disk and on the screen: its directory, metrics, pictures, progress."""

from recurjax.training.run.metrics import MetricsWriter
from recurjax.training.run.plots import plot_losses
from recurjax.training.run.progress import TrainingProgress
from recurjax.training.run.run_directory import LoadedRun, RunDirectory, load_run
from recurjax.training.run.run_lock import RunLock, held
from recurjax.training.run.shared_directory import check_shared
from recurjax.training.run.start_from import (
    check_frozen,
    check_start,
    load_frozen,
    load_start,
)

__all__ = [
    "LoadedRun",
    "MetricsWriter",
    "RunDirectory",
    "RunLock",
    "TrainingProgress",
    "check_frozen",
    "check_shared",
    "check_start",
    "held",
    "load_frozen",
    "load_run",
    "load_start",
    "plot_losses",
]
