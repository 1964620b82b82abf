"""Progress of training: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from recurjax.experiment import Experiment
from recurjax.machine.devices import peak_flops


class TrainingProgress:
    """Loss, tokens/s, MFU (where the device's peak is known) and time left.

    A terminal gets a bar; anything else, and the log file, a line per logged row.
    """

    def __init__(
        self,
        console: Console,
        experiment: Experiment,
        *,
        log: Path | None,
        devices: list[Any],
    ):
        """Prepares the display.

        Args:
          console: where to.
          experiment: gives steps, tokens per step and the variant's own FLOP count.
          log: a file that gets every line with its time; None for none.
          devices: devices that share the work.
        """
        training = experiment.training
        self._console, self._log = console, log
        self._steps = training.steps
        self._tokens_per_step = training.tokens_per_step
        # All devices of a mesh are of one kind.
        peak = peak_flops(devices[0])
        self._mfu_per_token = None
        if peak is not None:
            self._mfu_per_token = experiment.flops_per_token / (peak * len(devices))
        self._started: float | None = None
        self._first = self._seen = 0
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            _Status(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._steps, status="")

    def start(self, step: int) -> None:
        """Shows the bar at the step that training begins with or resumes at."""
        self._first = self._seen = step
        self._bar.update(self._task, completed=step)
        self._bar.start()
        if step:
            self.say(f"resuming at step {step} of {self._steps}")

    def stop(self) -> None:
        """Leaves the bar as it is."""
        self._bar.stop()

    def advance(self, step: int, loss: float) -> None:
        """Shows that `step` steps are done. The first call ends the compile time."""
        if self._started is None:
            # The first step compiles: rates count from its end.
            self._started, self._first = time.monotonic(), step
        self._seen = step
        status = self._status(loss)
        self._bar.update(self._task, completed=step, status=status)

    def line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a logged row where there is no bar."""
        text = f"step {step}/{self._steps}  {self._status(metrics['loss'])}"
        self._write_log(text)
        if not self._console.is_terminal:
            self._print(text)

    def rates(self) -> dict[str, float]:
        """Returns tokens_per_second since the first step and mfu, where known."""
        rate = self._tokens_per_second()
        if rate is None:
            return {}
        rates = {"tokens_per_second": rate}
        if self._mfu_per_token is not None:
            rates["mfu"] = rate * self._mfu_per_token
        return rates

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._write_log(text)
        self._print(text)

    def leave_out(self, seconds: float) -> None:
        """Excludes time that was not training, such as an evaluation, from the rate."""
        if self._started is not None:
            # The clock is moved on by the time that was not training.
            self._started += seconds

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            now = datetime.now().isoformat(timespec="seconds")
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{now} {text}\n")

    def _tokens_per_second(self) -> float | None:
        # Less the first step, which compiled.
        done = self._seen - self._first
        if self._started is None or done == 0:
            return None
        return done * self._tokens_per_step / (time.monotonic() - self._started)

    def _status(self, loss: float) -> str:
        parts = [f"loss {loss:.4f}"]
        rates = self.rates()
        if rates:
            rate = rates["tokens_per_second"]
            parts.append(f"{rate:,.0f} tokens/s")
            if "mfu" in rates:
                parts.append(f"MFU {rates['mfu']:.1%}")
            seconds = (self._steps - self._seen) * self._tokens_per_step / rate
            parts.append(f"{timedelta(seconds=round(seconds))} left")
        return "  ".join(parts)


class _Status(ProgressColumn):
    """Loss, rate and time left, and before the first step the seconds of compiling."""

    def render(self, task: Task) -> Text:
        compiling = f"compiling the training step, {task.elapsed or 0:.0f} s"
        return Text(task.fields["status"] or compiling)
