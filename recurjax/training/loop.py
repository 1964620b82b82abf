"""The training loop: resume, step, log, evaluate, save, stop."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import multihost_utils
from rich.console import Console

from recurjax.config_json import to_json
from recurjax.evaluation.perplexity import Score
from recurjax.experiment import Experiment
from recurjax.inference.generate import NotFinite, generate
from recurjax.inference.sampling import SamplingConfig
from recurjax.machine import early_interrupt, host, process_group
from recurjax.machine.distributed import require_joined
from recurjax.training.agreement import first_process
from recurjax.training.run import (
    Description,
    MetricsWriter,
    Mirror,
    RunDirectory,
    TrainingProgress,
    device_memory,
    hold,
    note_start,
    open_trackers,
    plot_losses,
)
from recurjax.training.session import Metrics, Session
from recurjax.training.spikes import Diverged, fault, skip_message
from recurjax.training.step import TrainState

_IN_FLIGHT = 2
"""Steps given to a device before the host waits for the oldest. A CPU allocates what a
step needs when it is given, so that each would take memory: there it is none."""


class TrainingResult(NamedTuple):
    """The outcome of a call of `train`.

    Attributes:
      outcome: "finished", or stopped by SIGTERM ("terminated") or by Ctrl-C.
      step: the last step done; its checkpoint is on disk.
      score: score of this call's last evaluation, if it made one.
      sample: the last continuation of the first of `evaluation.sample_prompts`.
      model: the trained parameters.
      compile_seconds: until the first step of this call was done.
      train_seconds: from there to the last step, without evaluations and saves' waits.
    """

    outcome: Literal["finished", "terminated", "interrupted"]
    step: int
    score: Score | None
    sample: str | None
    model: Any
    compile_seconds: float
    train_seconds: float


def train(
    experiment: Experiment,
    root: Path,
    *,
    console: Console | None = None,
    mirror: Mirror | None = None,
) -> TrainingResult:
    """Trains in the run directory `root`, and resumes from its newest good checkpoint.

    A run that was stopped, however, and is resumed ends with the same bits as one that
    was not. SIGTERM and Ctrl-C save and return, also in the middle of an evaluation; it
    is then made when the run is resumed.

    Args:
      experiment: what to train.
      root: the run directory.
      console: where progress is shown; None: on standard output.
      mirror: sends `root` to a bucket whenever a checkpoint is on disk; None: `root`
        is the run's own directory, which all processes share.

    Raises:
      UserError: config, data, devices and directory do not go together, another process
        trains there, or a checkpoint could not be written.
      Diverged: too many steps in a row had a bad loss, or the last evaluation had.
    """
    require_joined()
    process_group.watch()
    with ExitStack() as stack:
        try:
            return _train(experiment, root, console, mirror, stack)
        except (Exception, KeyboardInterrupt) as error:
            if process_group.leave(error):
                # Closing waits for the other processes, which are ending as well.
                stack.pop_all()
            raise


def _train(
    experiment: Experiment,
    root: Path,
    console: Console | None,
    mirror: Mirror | None,
    stack: ExitStack,
) -> TrainingResult:
    quiet = jax.process_index() != 0
    console = Console(quiet=True) if quiet else console or Console()
    check_lock = hold(RunDirectory(root).root, stack, console)
    session = Session(experiment, root, mirror=mirror)
    stack.callback(session.close)
    stack.enter_context(process_group.on_abort(session.finish_save))
    progress = TrainingProgress(
        console,
        experiment,
        log=None if quiet else session.directory.log,
        devices=list(session.mesh.devices.flat),
    )
    # The newest good checkpoint, or a new model; the loop cannot tell them apart.
    state = session.start(progress.say)
    start = int(state.step)
    host.give_back_freed_memory()  # what loading leaves
    writer = None if quiet else _open_writer(session, start, progress.say)
    if writer is not None:
        stack.callback(writer.close)
        stack.enter_context(process_group.on_abort(writer.close))
    early_interrupt.work_begins()  # the progress bar hides the cursor
    progress.start(start)
    stack.callback(progress.stop)
    stack.enter_context(process_group.on_abort(progress.stop))
    interruption = stack.enter_context(Interruption())
    loop = _Loop(session, progress, writer, interruption, check_lock)
    stack.callback(loop.stop_trace)
    return loop.run(state, start)


def _open_writer(
    session: Session, start: int, say: Callable[[str], None]
) -> MetricsWriter:
    experiment, directory = session.experiment, session.directory
    description = Description(
        name=experiment.name,
        config=to_json(experiment),
        start=note_start(directory.starts, step=start),
        ids=directory.trackers,
    )
    return MetricsWriter(
        directory.metrics,
        directory.tensorboard,
        resumed_from=start,
        description=description,
        trackers=open_trackers(experiment.training, description),
        say=say,
    )


class _Loop:
    """The steps of one call, and what is done between them."""

    def __init__(
        self,
        session: Session,
        progress: TrainingProgress,
        writer: MetricsWriter | None,
        interruption: "Interruption",
        check_lock: Callable[[], None],
    ):
        self.session, self.progress = session, progress
        self.check_lock = check_lock
        self.writer, self.interruption = writer, interruption
        self.experiment = session.experiment
        self.pending: deque[tuple[int, Metrics]] = deque()
        self.score: Score | None = None
        self.sample: str | None = None
        self.tracing = False
        self.cut_short = False
        self.skipped = 0  # in a row, at the last step that was reported
        self.owes_save = False
        on_cpu = session.mesh.devices.flat[0].platform == "cpu"
        self.in_flight = 0 if on_cpu else _IN_FLIGHT

    def run(self, state: TrainState, start: int) -> TrainingResult:
        training = self.experiment.training
        if self._owes_evaluation(start):
            self._evaluate_and_save(state, start)
        step, began, compiled, paused = start, time.monotonic(), 0.0, 0.0
        while step < training.steps and not self.interruption.requested():
            self._trace(step + 1)
            state, metrics = self.session.step(state)
            step += 1
            # An accelerator's step is not waited for: its metrics are read two steps
            # later, when they are there. Only the first is: it compiles.
            self.pending.append((step, metrics))
            if step == start + 1:
                self._report(in_flight=0)
                compiled = time.monotonic() - began
            self._report(in_flight=self.in_flight)
            if self._is_due(step) or self.owes_save:
                # Everything before this point is shown and written before it is saved.
                self._report(in_flight=0)
                pause = time.monotonic()
                self._evaluate_and_save(state, step)
                pause = time.monotonic() - pause
                self.progress.leave_out(pause)
                paused += pause
        self._report(in_flight=0)
        seconds = time.monotonic() - began - compiled - paused
        self.stop_trace()
        # After an interrupted evaluation save the run as unfinished, so that it
        # evaluates first when it is resumed.
        finished = step == training.steps and not self.cut_short
        if not finished:
            self._save(state, step)
        self.session.wait()
        if self.writer is not None:
            plot_losses(
                self.session.directory.metrics, self.session.directory.loss_plot
            )
        if finished:
            self._refuse_a_bad_end(state, step)
        interrupted = self.interruption.stop == "interrupt"
        stopped = "interrupted" if interrupted else "terminated"
        return TrainingResult(
            outcome="finished" if finished else stopped,
            step=step,
            score=self.score,
            sample=self.sample,
            model=state.model,
            compile_seconds=compiled,
            train_seconds=seconds,
        )

    def _refuse_a_bad_end(self, state: TrainState, step: int) -> None:
        """Tells of a run that reached its last step and no model.

        Raises:
          Diverged: no step counted, or the last validation loss is not finite.
        """
        if int(state.spikes.accepted) == 0:
            raise Diverged(
                f"the run reached step {step} without one accepted step (see the "
                f"lines above or {self.session.directory.log}), so its parameters "
                "are the initial ones: lower the learning rate or check the data, "
                "and start again under another --name"
            )
        directory = self.session.directory
        if first_process(lambda: directory.has_no_finite_loss(step)):
            raise Diverged(
                f"the run reached step {step} with a validation loss that is not "
                "finite: lower the learning rate or lengthen the warm-up, and "
                "start again under another --name"
            )

    def _is_due(self, step: int) -> bool:
        return self._evaluates_at(step) or (
            step % self.experiment.training.checkpoint_every == 0
        )

    def _evaluates_at(self, step: int) -> bool:
        every = self.experiment.evaluation.every
        last = step == self.experiment.training.steps
        return last or (every > 0 and step % every == 0)

    def _report(self, *, in_flight: int) -> None:
        """Reads metrics of finished steps, leaving `in_flight` steps to the device."""
        training = self.experiment.training
        while len(self.pending) > in_flight:
            step, arrays = self.pending.popleft()
            metrics = {name: float(x) for name, x in jax.device_get(arrays).items()}
            skipped = self.skipped = int(metrics["skipped"])
            self.progress.advance(step, metrics["loss"])
            if skipped:
                self.progress.say(skip_message(step, skipped, metrics))
            if step % training.log_every == 0 or step == training.steps:
                self.progress.line(step, metrics)
                if self.writer is not None:
                    row = metrics | self.progress.rates() | device_memory()
                    self.writer.write(step, "train", row | self.session.epochs(step))
            if skipped >= training.spikes.patience and training.spikes.enabled:
                self._give_up(step, skipped, metrics)

    def _give_up(self, step: int, skipped: int, metrics: dict[str, float]) -> None:
        self.session.wait()
        # The update before the first bad step may have caused it, so only a checkpoint
        # whose next step counted is good.
        first = step - skipped + 1
        good = [at for at in self.session.checkpoints() if at < first - 1]
        where = (
            f"the last good checkpoint is step {good[-1]} in "
            f"{self.session.directory.checkpoints}"
            if good
            else "no checkpoint precedes the first of them"
        )
        raise Diverged(
            f"training stopped at step {step} after {skipped} skipped steps in "
            f"a row ({fault(metrics)}); {where}; lower the learning rate, "
            "lengthen the warm-up or change --training.spikes.sigma, and "
            "start again under another --name"
        )

    def _evaluate_and_save(self, state: TrainState, step: int) -> None:
        if not self._evaluates_at(step):
            self._save_if_sound(state, step)
            return
        host.give_back_freed_memory()
        try:
            score = self.session.evaluate(state, between=self._poll)
        except _Interrupted:
            self.cut_short = True
            return
        note = self._floor_note(step, score)
        self.score = score
        self.progress.say(f"step {step}: {score.sentence()}")
        if note is not None:
            self.progress.say(note)
        if self.writer is not None:
            self.writer.write(step, "validation", score.metrics())
        try:
            self._write_samples(state, step)
        finally:  # Save before sampling, which may fail.
            self._save_if_sound(state, step, score.loss)
        host.give_back_freed_memory()

    def _floor_note(self, step: int, score: Score) -> str | None:
        """Returns a message if a task's accuracy is still at its floor, or None."""

        def at_floor(score: Score | None) -> bool:
            if score is None or score.accuracy is None:
                return False
            return score.accuracy.is_at_floor(score.tokens)

        last = step == self.experiment.training.steps
        if not (at_floor(score) and (last or at_floor(self.score))):
            return None
        return (
            f"step {step}: the accuracy is still at the task's floor, which needs no "
            "recall: train longer, or see the settings that learn in docs/tasks.md"
        )

    def _save_if_sound(
        self, state: TrainState, step: int, loss: float | None = None
    ) -> None:
        """Saves, but not while steps are skipped: then after the next that counts.

        A model that diverged would take the place of the last ones that did not. The
        last step is saved in any case: the run would otherwise never end.
        """
        last = step == self.experiment.training.steps
        self.owes_save = self.skipped > 0 and not last
        if not self.owes_save:
            self._save(state, step, loss)

    def _save(self, state: TrainState, step: int, loss: float | None = None) -> None:
        self.check_lock()
        # First the metrics: a checkpoint on disk means that its steps' rows are too.
        if self.writer is not None:
            self.writer.flush()
        self.session.save(state, step, loss)

    def _poll(self) -> None:
        if self.interruption.requested():
            raise _Interrupted

    def _owes_evaluation(self, start: int) -> bool:
        """Whether the run was stopped in the evaluation of the step it starts from."""
        directory = self.session.directory
        return (
            start > 0
            and self._evaluates_at(start)
            and not first_process(lambda: directory.was_evaluated(start))
        )

    def _write_samples(self, state: TrainState, step: int) -> None:
        evaluation = self.experiment.evaluation
        if not evaluation.sample_prompts:
            return
        if jax.process_count() > 1:
            self.progress.say("samples are not drawn while several processes train")
            return
        try:
            samples = generate(
                state.model,
                list(evaluation.sample_prompts),
                tokenizer=self.session.dataset.tokenizer,
                max_new_tokens=evaluation.sample_tokens,
                sampling=SamplingConfig(temperature=evaluation.temperature),
                seed=self.experiment.training.seed,
            )
        except NotFinite as error:  # Training may recover: report it and continue.
            self.progress.say(f"no samples: {error}")
            return
        self.sample = evaluation.sample_prompts[0] + samples.texts[0]
        pairs = zip(evaluation.sample_prompts, samples.texts, strict=True)
        texts = [prompt + text for prompt, text in pairs]
        self.session.directory.append_samples(step, texts)

    def _trace(self, step: int) -> None:
        """Starts and ends the profiler around the steps of `training.profile`."""
        profile = self.experiment.training.profile
        if profile is None:
            return
        first, last = profile
        if step == first:
            self._report(in_flight=0)
            jax.profiler.start_trace(str(self.session.directory.profile))
            self.tracing = True
        if step == last + 1:
            self._report(in_flight=0)
            self.stop_trace()

    def stop_trace(self) -> None:
        """Writes the profiler trace that is under way, if there is one."""
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()
            self.progress.say(f"profiler trace: {self.session.directory.profile}")


class _Interrupted(Exception):
    """An evaluation was left because the run is to stop."""


Stop = Literal["terminate", "interrupt"]


class Interruption:
    """Remembers a signal until the loop asks; a second Ctrl-C stops at once.

    With several processes, jax's preemption service makes all of them answer yes at
    the same step, about ten seconds after one of them got SIGTERM; Ctrl-C is passed on
    to it as SIGTERM.
    """

    def __init__(self):
        self.stop: Stop | None = None
        self._polls = 0
        self._agreed = False
        self._shared = jax.process_count() > 1
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        # From here on a signal is recorded; one that an earlier handler swallowed ends
        # here.
        early_interrupt.stop_if_noted()
        # jax's service has taken SIGTERM already, and tells all processes of it.
        if self._shared:
            self._handle(signal.SIGINT, self._pass_on)
        else:
            self._handle(signal.SIGINT, self._remember)
            self._handle(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # None: it was not installed from Python
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def requested(self) -> bool:
        """Returns whether to stop here; every process must ask equally often."""
        if not self._shared:
            return self.stop is not None
        if not self._agreed:
            # Polls are counted: the service answers yes at the same number in every
            # process.
            self._polls += 1
            # True at the agreed poll only, not at those after it.
            self._agreed = multihost_utils.reached_preemption_sync_point(self._polls)
        if self._agreed:
            self.stop = self.stop or "terminate"
        return self._agreed

    def _handle(self, number: signal.Signals, handler) -> None:
        self._previous[number] = signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.stop = "interrupt" if number == signal.SIGINT else "terminate"
        # Who presses Ctrl-C again does not want to wait for a checkpoint.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.stop = "interrupt"
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.default_int_handler)
