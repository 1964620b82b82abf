"""`recurjax evaluate text RUN` and `evaluate exits RUN`: a text, or the run's data."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from recurjax.cli.evaluate.options import (
    Evaluation,
    Figures,
    Measure,
    log,
    require_folder,
)
from recurjax.data.config import DataConfig, TextFiles
from recurjax.data.dataset import lossy_note, open_dataset
from recurjax.data.tasks import TaskData
from recurjax.errors import UserError
from recurjax.evaluation.by_position import loss_by_position, plot_by_position
from recurjax.evaluation.exit_scores import (
    THRESHOLDS,
    ExitScore,
    cheapest,
    exit_trajectories,
    fit_exit_head,
    plot_exits,
    read_exit_head,
    score_exits,
    write_exit_head,
)
from recurjax.evaluation.journal import Journal
from recurjax.evaluation.perplexity import Score, score
from recurjax.evaluation.progress import progress_bar
from recurjax.evaluation.rows import Row, share_error
from recurjax.exits import exits_of
from recurjax.files.atomic import write_atomic
from recurjax.ranges import (
    LARGEST_BATCH,
    Fraction,
    NonNegativeFloat,
    PositiveInt,
)
from recurjax.sharding import MeshConfig, check_batch, local_rows, placed, reading_mesh
from recurjax.training.objective import (
    Distilled,
    Exits,
    NextToken,
    Objective,
    RandomLoops,
)
from recurjax.training.run import LoadedRun
from recurjax.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class OfText(Evaluation):
    """Options of evaluations of a text.

    Attributes:
      text: a text file; None: a split of the run's own data.
      split: the split of the run's own data to read.
      length: tokens per row; each row starts without context. None: as in training.
      batch: rows per batch.
      tokens: stop after the batch that reaches this number of tokens; None: read all.
      plot: draw the figures into this PNG file.
    """

    text: Path | None = None
    split: Literal["validation", "train"] = "validation"
    length: PositiveInt | None = None
    batch: PositiveInt = 32
    tokens: PositiveInt | None = None
    plot: Path | None = None

    def __post_init__(self):
        _require_batch(self.batch, self.length or 1)
        Evaluation.__post_init__(self)
        require_folder("plot", self.plot)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateText(OfText):
    """Scores a text with a trained model and prints JSON.

    Attributes:
      positions: also report the loss by position, averaged over this many positions; a
        --length beyond that of training shows how the model generalizes. None: 64 if
        --plot is given.
      mesh: devices that hold the model; the first of several processes reports.
    """

    positions: PositiveInt | None = None
    mesh: MeshConfig = MeshConfig(data=1)

    @property
    def devices(self) -> MeshConfig:
        return self.mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateExits(OfText):
    """Scores early exits of a recursive model, on one device.

    Reports loss, mean loops and agreement with the full model per rule and threshold.

    Attributes:
      thresholds: thresholds to try with every rule; None: a list for each rule.
      most_loss: largest loss in nats per token; prints each rule's threshold with the
        fewest loops that stays within it.
      fit_head: first train an exit head on this many batches of the run's training
        text, and write it into the run as exit_head.npz.
      trajectories: write an .npz file with `exits` [rows, T], the first loop after
        which each token may exit (0: none), which the simulation of figure 8 in
        experiments/relaxed_recursive_transformer/throughput.py reads.
    """

    trajectories: Path | None = None
    thresholds: tuple[Fraction, ...] | None = None
    most_loss: NonNegativeFloat | None = None
    fit_head: PositiveInt | None = None

    def __post_init__(self):
        OfText.__post_init__(self)
        require_folder("trajectories", self.trajectories)


class RowSource:
    """Rows of one length of a text or a task, in order, a batch at a time.

    Attributes:
      name: name of the text or task, for the figures.
      settings: what makes the figures others: the length, and how much is read.
      mesh: the devices that hold the rows.
      has_segments: whether the rows say which document a token is of.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        data: DataConfig | TaskData,
        name: str,
        *,
        split: Literal["validation", "train"],
        length: int | None,
        batch: int,
        tokens: int | None = None,
        mesh: MeshConfig,
    ):
        """Opens the data.

        Args:
          length: tokens per row; None: as in training, or as a task's test asks.
          tokens: reads the first batches that hold this many; None: all.

        Raises:
          UserError: the rows fit neither the model nor the mesh.
        """
        experiment = loaded.experiment
        self.dataset = open_dataset(data, tokenizer=loaded.tokenizer)
        self.length = length or self.dataset.evaluation_length(
            experiment.training.length
        )
        option = f"--length {self.length}"
        if (reason := experiment.model.refuses_length(self.length, option)) is not None:
            raise UserError(reason)
        _require_batch(batch, self.length)
        self.mesh = reading_mesh(mesh)
        check_batch(batch, self.mesh, name="--batch")
        # A model that runs on the mesh at one length may refuse another.
        if (reason := loaded.model.stack.refuses(self.mesh, self.length)) is not None:
            raise UserError(reason)
        self.name, self.batch = name, batch
        self.has_segments = data.has_segments
        self.split: Literal["validation", "train"] = split
        self.settings: dict[str, Any] = {"length": self.length}
        self._limit = None
        if tokens is not None:
            # Full batches, rounded up.
            self._limit = -(-tokens // (batch * self.length))
            # A part of a text is another text: how much was read belongs to the figure.
            self.settings["tokens"] = tokens
        self._rows = self.dataset.loader(
            split,
            length=self.length,
            batch=batch,
            rows=local_rows(batch, self.mesh),
            in_order=True,
        )

    def batches(self) -> Iterator[Batch]:
        """Yields the batches of one pass."""
        return placed(islice(self._rows, self._limit), self.mesh, batch=self.batch)

    @property
    def count(self) -> int | None:
        """The number of batches; None: unknown."""
        known = [n for n in (self._rows.batches, self._limit) if n is not None]
        return min(known, default=None)


def prepare_text(options: EvaluateText) -> Measure:
    """Returns what scores the text."""

    def measure(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Figures:
        source = _source(options, loaded)
        stretch = options.positions or (64 if options.plot is not None else None)
        if stretch is not None and not _reads_exactly(source, loaded):
            raise UserError(
                "--positions and --plot read rows with the exact recurrence, which "
                "cannot tell this run's documents apart: leave them out, or give "
                "--text, whose rows have no documents"
            )
        report, rows = score_rows(source, loaded, mesh)
        if stretch is not None:
            with jax.set_mesh(source.mesh):
                stretches = loss_by_position(
                    loaded.model,
                    source.batches(),
                    stretch=stretch,
                    chunks=loaded.experiment.objective.vocabulary_chunks,
                    mesh=mesh,
                )
            report["positions"] = [part._asdict() for part in stretches]
            # One of several processes draws the picture.
            if options.plot is not None and jax.process_index() == 0:
                curves = {loaded.experiment.name: stretches}
                trained = loaded.experiment.training.length
                plot_by_position(curves, options.plot, trained=trained)
        return report, rows

    return measure


def prepare_exits(options: EvaluateExits) -> Measure:
    """Returns what scores the rules of exits."""

    def measure(loaded: LoadedRun, mesh: Mesh | None, journal: Journal) -> Figures:
        exits_of(loaded.model)  # refuses a model without exits
        source = _source(options, loaded)
        # One of an earlier call serves, until a new one takes its place in the run.
        head = read_exit_head(options.run)
        if options.fit_head is not None:
            data = open_dataset(loaded.experiment.data, tokenizer=loaded.tokenizer)
            rows = data.loader("train", length=source.length, batch=source.batch)
            batches = islice(iter(rows), options.fit_head)
            head = fit_exit_head(
                loaded.model, placed(batches, source.mesh, batch=source.batch)
            )
            log(f"an exit head was written to {write_exit_head(options.run, head)}")
        values: dict[str, Sequence[float]] = dict(THRESHOLDS)
        if options.thresholds is not None:
            values = dict.fromkeys(THRESHOLDS, options.thresholds)
        # Without a trained head there is nothing to compare with its thresholds.
        if head is None:
            del values["head"]
        scores = score_exits(
            loaded.model,
            source.batches,
            token_bytes=source.dataset.token_bytes,
            thresholds=values,
            head=head,
            report=log,
        )
        report: dict[str, Any] = {"text": source.name, "length": source.length}
        report["exits"] = [_as_json(score) for score in scores]
        if options.most_loss is not None:
            chosen = cheapest(scores, options.most_loss)
            report["chosen"] = [_as_json(score) for score in chosen]
            for score in chosen:
                log(
                    f"{score.rule}:{score.threshold:g} stays within "
                    f"{options.most_loss} nats: {score.loss:.4f} at "
                    f"{score.loops:.3f} loops a token"
                )
            if not chosen:
                log(f"nothing stays within {options.most_loss} nats per token")
        if options.trajectories is not None:
            exits = exit_trajectories(loaded.model, source.batches())
            data = io.BytesIO()
            np.savez_compressed(data, exits=exits.astype(np.uint8))
            write_atomic(options.trajectories, data.getvalue())
        if options.plot is not None:
            plot_exits(scores, options.plot)
        return report, _exit_rows(scores, source, loaded.step)

    return measure


def score_rows(source: RowSource, loaded: LoadedRun, mesh: Mesh | None) -> Figures:
    """Scores rows by the run's objective, and by the exact recurrence where it differs.

    Args:
      mesh: the mesh that the figures are gathered over; None: one device.
    """

    def scored(objective: Objective) -> Score:
        name = f"batches of {source.name}"
        with jax.set_mesh(source.mesh), progress_bar(name, source.count) as done:
            return score(
                loaded.model,
                source.batches(),
                token_bytes=source.dataset.token_bytes,
                objective=objective,
                between=lambda: done(1),
                labels=source.dataset.labels(source.split, batch=source.batch),
                mesh=mesh,
            )

    if (note := lossy_note(source.dataset)) is not None:
        log(note)
    objective = loaded.experiment.objective
    result = scored(objective)
    report = {"text": source.name, "length": source.length, **_score_as_json(result)}
    rows = _score_rows(result, source.name, source.settings, loaded.step)
    # Some objectives approximate a recurrence by parallel passes; the exact figure is
    # that of the recurrence, which decodes.
    if isinstance(objective, NextToken | Distilled | Exits | RandomLoops):
        return report, rows
    if _reads_exactly(source, loaded):
        exact = scored(NextToken(vocabulary_chunks=objective.vocabulary_chunks))
        report["exact"] = _score_as_json(exact)
        name = f"{source.name}, exact"
        rows += _score_rows(exact, name, source.settings, loaded.step)
    else:
        log(
            "the exact recurrence cannot tell this run's documents apart: its figure "
            "is left out"
        )
    return report, rows


def _reads_exactly(source: RowSource, loaded: LoadedRun) -> bool:
    """Whether the model, called as it is, takes the rows."""
    return not source.has_segments or loaded.model.config.takes_segments


def _source(options: OfText, loaded: LoadedRun) -> RowSource:
    data, split, name = loaded.experiment.data, options.split, f"{options.split} split"
    if options.text is not None:
        if isinstance(data, TaskData):
            raise UserError(
                f"--text is for runs trained on text, and {options.run} is trained "
                "on a task: leave it out to evaluate the task"
            )
        # All of the text is validation.
        data = DataConfig(
            corpus=TextFiles(patterns=(str(options.text),)),
            tokenizer=data.tokenizer,
            validation_fraction=1.0,
        )
        split, name = "validation", str(options.text)
    return RowSource(
        loaded,
        data,
        name,
        split=split,
        length=options.length,
        batch=options.batch,
        tokens=options.tokens,
        mesh=options.devices,
    )


def _require_batch(batch: int, length: int) -> None:
    if batch * length > LARGEST_BATCH:
        raise UserError(
            f"--batch {batch} x --length {length} exceeds 2^28 tokens per "
            "batch: lower one of them"
        )


def _score_as_json(result: Score) -> dict[str, Any]:
    values = result._asdict()
    if result.accuracy is None:
        del values["accuracy"]
    else:
        values["accuracy"] = result.accuracy._asdict()
    if not result.passes:
        del values["passes"]
    return values


def _score_rows(
    result: Score, name: str, settings: dict[str, Any], step: int
) -> list[Row]:
    rows = []
    floors = {} if result.accuracy is None else result.accuracy.floors()
    for metric, value in result.metrics().items():
        if metric == "accuracy_floor":  # printed next to the accuracy
            continue
        error, n = None, result.tokens
        if result.accuracy is not None and metric == "sequence_accuracy":
            # Of entire rows: the number of rows is what the error depends on.
            n = result.accuracy.rows
            error = share_error(value, n)
        elif result.accuracy is not None and metric.startswith("accuracy/"):
            n = result.accuracy.answers[metric.removeprefix("accuracy/")]
        rows.append(
            Row(
                step=step,
                task=name,
                metric=metric,
                value=value,
                stderr=error,
                n=n,
                floor=floors.get(metric),
                settings=settings,
            )
        )
    return rows


def _as_json(score: ExitScore) -> dict[str, Any]:
    values = score._asdict()
    # The same for every rule; the run's rows have it.
    del values["tokens"]
    return values


def _exit_rows(scores: Sequence[ExitScore], source: RowSource, step: int) -> list[Row]:
    return [
        Row(
            step=step,
            task=source.name,
            metric=metric,
            value=getattr(score, metric),
            n=score.tokens,
            # In the form of `recurjax generate --exit`.
            settings=source.settings | {"exit": f"{score.rule}:{score.threshold:g}"},
        )
        for score in scores
        for metric in ("loss", "bits_per_byte", "loops", "agreement")
    ]
