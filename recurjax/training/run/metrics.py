"""Metrics of a run: metrics.jsonl, TensorBoard, trackers and loss.png."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from recurjax.files.atomic import write_figure
from recurjax.files.json_files import json_text
from recurjax.files.metric_rows import read_rows
from recurjax.training.run.trackers import Description, Tracker


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
        description: Description | None = None,
        trackers: Sequence[Tracker] = (),
        say: Callable[[str], None] = print,
    ):
        self._file = file.open("a", encoding="utf-8")
        # Rows of steps that will run again are dropped there as well.
        self._tensorboard = _EventFile(tensorboard, purge_step=resumed_from + 1)
        self._trackers, self._say = list(trackers), say
        if description is not None:
            text = json.dumps(
                {"config": description.config} | description.start, indent=1
            )
            # Indented by four places it is a block of code in TensorBoard's Markdown.
            block = "".join(f"    {line}\n" for line in text.splitlines())
            self._tensorboard.write_text(resumed_from, "config", block)

    def write(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Writes one row."""
        row = {"step": step, "kind": kind, **metrics}
        self._file.write(json_text(row) + "\n")
        for name, value in metrics.items():
            # TensorBoard cannot draw NaN; metrics.jsonl has it as null.
            if not math.isfinite(value):
                continue
            self._tensorboard.write_scalar(step, f"{kind}/{name}", value)
        # Trackers have one space of names for all kinds of rows.
        row = {f"{kind}/{name}": value for name, value in metrics.items()}
        for tracker in list(self._trackers):
            try:
                tracker.write(step, row)
            except Exception as error:  # a service that is gone must not stop a run
                self._trackers.remove(tracker)
                self._say(
                    f"step {step}: {type(tracker).__name__} takes no more rows, so the "
                    f"run continues without it: {' '.join(str(error).split())[:300]}"
                )

    def flush(self) -> None:
        """Makes all rows visible to readers of the files, also after a power cut."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._tensorboard.flush()

    def close(self) -> None:
        """Flushes and closes."""
        self._file.close()
        self._tensorboard.close()
        for tracker in self._trackers:
            tracker.close()


class _EventFile:
    """A file of TensorBoard's events that is written in the caller's thread.

    tensorboardX' SummaryWriter has a thread for it, which ends with the first write
    that fails, as on a full disk: later rows then wait forever. Here the write raises.
    """

    def __init__(self, folder: Path, *, purge_step: int):
        # Imported here: it brings protobuf in, which users of the library alone need
        # not wait for.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        folder.mkdir(parents=True, exist_ok=True)
        # Protobuf makes its classes when it is imported, where pyright sees none.
        proto: Any = event_pb2
        self._summary, self._event = summary, proto.Event
        self._file = EventsWriter(str(folder / "events"))
        start = proto.SessionLog(status=proto.SessionLog.START)
        self._write(purge_step, session_log=start)

    def write_scalar(self, step: int, name: str, value: float) -> None:
        self._write(step, summary=self._summary.scalar(name, value))

    def write_text(self, step: int, name: str, text: str) -> None:
        self._write(step, summary=self._summary.text(name, text))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(step=step, wall_time=time.time(), **content))


def device_memory() -> dict[str, float]:
    """Returns the bytes in use on this process' fullest device, now and at most so far.

    Empty where a device does not say, as CPUs do not.
    """
    # All devices of the process: the fullest one is what runs out.
    each = [device.memory_stats() or {} for device in jax.local_devices()]
    names = {
        "device_memory_bytes": "bytes_in_use",
        "device_memory_peak_bytes": "peak_bytes_in_use",
    }
    return {
        ours: float(max(stats[theirs] for stats in each))
        for ours, theirs in names.items()
        if all(theirs in stats for stats in each)
    }


def plot_losses(metrics: Path, png: Path) -> None:
    """Draws training and validation loss, in nats per token, over steps.

    Args:
      metrics: a run's metrics.jsonl.
      png: written atomically.
    """
    from matplotlib.figure import Figure  # slow to import, and needed here only

    rows = read_rows(metrics).rows
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.subplots()
    for kind, color, style in (("train", "0.6", "-"), ("validation", "C0", "o-")):
        points = [(r["step"], r.get("loss")) for r in rows if r["kind"] == kind]
        # null: a loss that was not finite leaves a gap.
        points = [(x, math.nan if loss is None else loss) for x, loss in points]
        if points:
            label = kind
            if kind == "validation":
                label += f" ({points[-1][1]:.4f} at step {points[-1][0]:,})"
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, style, color=color, label=label, markersize=4)
    axes.set(xlabel="training step", ylabel="cross-entropy loss (nats per token)")
    if axes.lines:
        axes.legend(frameon=False)
    write_figure(figure, png)
