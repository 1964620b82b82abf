"""A run on disk and on the screen: its directory, metrics, pictures, progress."""

from recurjax.training.run.metrics import MetricsWriter, device_memory
from recurjax.training.run.mirror import Mirror, mirrored
from recurjax.training.run.plots import plot_losses
from recurjax.training.run.progress import TrainingProgress
from recurjax.training.run.run_directory import LoadedRun, RunDirectory, load_run
from recurjax.training.run.run_lock import held, hold
from recurjax.training.run.shared_directory import check_shared
from recurjax.training.run.start_from import (
    check_frozen,
    check_start,
    load_frozen,
    load_start,
)
from recurjax.training.run.starts import note_start
from recurjax.training.run.trackers import Description, open_trackers

__all__ = [
    "Description",
    "LoadedRun",
    "MetricsWriter",
    "Mirror",
    "RunDirectory",
    "TrainingProgress",
    "check_frozen",
    "check_shared",
    "check_start",
    "device_memory",
    "held",
    "hold",
    "load_frozen",
    "load_run",
    "load_start",
    "mirrored",
    "note_start",
    "open_trackers",
    "plot_losses",
]
