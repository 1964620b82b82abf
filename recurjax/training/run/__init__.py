"""A run on disk and on the screen: its directory, metrics, pictures, progress."""

from recurjax.training.run.metrics import MetricsWriter, device_memory, plot_losses
from recurjax.training.run.mirror import Mirror, mirrored
from recurjax.training.run.progress import TrainingProgress
from recurjax.training.run.run_directory import (
    Base,
    LoadedRun,
    RunDirectory,
    check_frozen,
    check_shared,
    check_start,
    load_adapters,
    load_frozen,
    load_run,
    load_saved,
    load_start,
)
from recurjax.training.run.run_lock import held, hold
from recurjax.training.run.trackers import Description, note_start, open_trackers

__all__ = [
    "Base",
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
    "load_adapters",
    "load_frozen",
    "load_run",
    "load_saved",
    "load_start",
    "mirrored",
    "note_start",
    "open_trackers",
    "plot_losses",
]
