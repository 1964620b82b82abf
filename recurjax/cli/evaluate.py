"""`recurjax evaluate RUN`: loss, also by position, bits per byte, CORE, as JSON."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from recurjax.cli.options import parse
from recurjax.data.config import DataConfig, TextFiles
from recurjax.data.dataset import open_dataset
from recurjax.data.tasks import TaskData
from recurjax.errors import UserError
from recurjax.evaluation import core_model
from recurjax.evaluation.by_position import loss_by_position, plot_by_position
from recurjax.evaluation.core import TaskScore
from recurjax.evaluation.core_files import read_tasks
from recurjax.evaluation.core_prompts import Task
from recurjax.evaluation.perplexity import score
from recurjax.files import write_whole
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training.objective import NextToken, Objective
from recurjax.training.placement import placed
from recurjax.training.run import LoadedRun, load_run
from recurjax.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Scores a text, or CORE's tasks, with a trained model and prints JSON.

    Attributes:
      run: the run directory.
      text: a text file; without one, a split of the run's own data.
      split: of the data, without `text`.
      length: tokens a row; each row starts without context. None: as in training.
      batch: rows at a time.
      batches: scores the first so many batches; None: the whole split.
      tokens: or the first batches that hold so many tokens.
      positions: also the loss by position, one figure for this many positions; with
        --length beyond that of training it shows how the model generalises.
      plot: draws the loss by position into this PNG file.
      core: scores no text but in-context learning: the folder of a CORE bundle as
        nanochat has it, or a folder of prepared task files, or one of them.
      core_limit: so many items of each task; None: all.
      step: of the checkpoint; None: the newest.
      json: also write the JSON to this file.
    """

    run: Annotated[Path, tyro.conf.Positional]
    text: Path | None = None
    split: Literal["validation", "train"] = "validation"
    length: int | None = None
    batch: int = 32
    batches: int | None = None
    tokens: int | None = None
    positions: int | None = None
    plot: Path | None = None
    core: Path | None = None
    core_limit: int | None = None
    step: int | None = None
    json: Path | None = None

    def __post_init__(self):
        if self.batch < 1 or (self.length is not None and self.length < 1):
            raise UserError(
                "--batch and --length must be at least 1, got "
                f"{self.batch} and {self.length}"
            )
        if self.batches is not None and self.tokens is not None:
            raise UserError("--batches and --tokens both set an end: give one of them")
        for name in ("batches", "tokens"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise UserError(f"--{name} must be at least 1, got {given}")
        if self.positions is not None and self.positions < 1:
            raise UserError(f"--positions must be at least 1, got {self.positions}")
        if self.plot is not None and self.positions is None:
            raise UserError("--plot draws the loss by position: add --positions")
        of_text = ("text", "length", "positions", "batches", "tokens")
        if self.core is not None and any(getattr(self, name) for name in of_text):
            raise UserError(
                "--core scores tasks: leave out --text, --length, --positions, "
                "--batches and --tokens"
            )
        if self.core_limit is not None and (self.core is None or self.core_limit < 1):
            raise UserError("--core-limit must be at least 1 and goes with --core")
        for name in ("json", "plot"):
            file = getattr(self, name)
            if file is not None and not file.parent.is_dir():
                raise UserError(f"--{name}: there is no directory {file.parent}")


def run(argv: list[str]) -> int:
    """Runs the command."""
    options = parse(Evaluate, argv, prog="recurjax evaluate")
    tasks = None if options.core is None else read_tasks(options.core)
    loaded = load_run(options.run, step=options.step, report=_say)
    report: dict[str, Any] = {"run": str(options.run), "step": loaded.step}
    if tasks is None:
        report |= _of_text(options, loaded)
    else:
        report |= {"tasks": str(options.core)} | _of_core(options, loaded, tasks)
    text = json.dumps(report, indent=2)
    print(text)
    if options.json is not None:
        write_whole(options.json, text + "\n")
    return 0


def _of_core(
    options: Evaluate, loaded: LoadedRun, tasks: tuple[Task, ...]
) -> dict[str, Any]:
    def tell(reading: str, task: TaskScore) -> None:
        _say(f"{reading}: {task.label}: {task.accuracy:.4f} of {task.items:,} items")

    scores = core_model.core_of(
        loaded.model, loaded.tokenizer, tasks, limit=options.core_limit, report=tell
    )
    _say(core_model.markdown(scores).rstrip())
    return core_model.as_json(scores)


def _of_text(options: Evaluate, loaded: LoadedRun) -> dict[str, Any]:
    experiment = loaded.experiment
    data = experiment.data
    if options.text is not None:
        if isinstance(data, TaskData):
            raise UserError(
                f"{options.run} was trained on a task: leave --text out to test it"
            )
        data = DataConfig(
            corpus=TextFiles(patterns=(str(options.text),)),
            tokenizer=data.tokenizer,
            validation_fraction=1.0,
        )
    dataset = open_dataset(data, tokenizer=loaded.tokenizer)
    length = options.length or dataset.evaluation_length(experiment.training.length)
    longest = experiment.model.max_length
    if longest is not None and length > longest:
        raise UserError(
            f"--length {length} exceeds the model's {longest} learned positions"
        )
    split = "validation" if options.text is not None else options.split
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    limit = options.batches
    if options.tokens is not None:
        limit = -(-options.tokens // (options.batch * length))

    def batches() -> Iterator[Batch]:
        rows = dataset.loader(split, length=length, batch=options.batch, in_order=True)
        return placed(islice(rows, limit), mesh, batch=options.batch)

    def scored(objective: Objective) -> dict[str, Any]:
        sizes = loaded.tokenizer.token_bytes
        result = score(
            loaded.model,
            batches(),
            token_bytes=sizes,
            objective=objective,
            slices=dataset.slices(split, batch=options.batch),
        )
        told = result._asdict()
        if result.accuracy is None:
            del told["accuracy"]
        else:
            told["accuracy"] = result.accuracy._asdict()
        if not result.passes:
            del told["passes"]
        return told

    objective = experiment.objective
    report: dict[str, Any] = {
        "text": f"{split} split" if options.text is None else str(options.text),
        "length": length,
        **scored(objective),
    }
    if not isinstance(objective, NextToken):
        # Beside training's parallel passes, the recurrence that decoding runs.
        exact = NextToken(vocabulary_chunks=objective.vocabulary_chunks)
        report["exact"] = scored(exact)
    if options.positions is not None:
        stretches = loss_by_position(
            loaded.model,
            batches(),
            stretch=options.positions,
            chunks=objective.vocabulary_chunks,
        )
        report["positions"] = [stretch._asdict() for stretch in stretches]
        if options.plot is not None:
            trained, curves = experiment.training.length, {experiment.name: stretches}
            plot_by_position(curves, options.plot, trained=trained)
    return report


def _say(text: str) -> None:
    print(text, file=sys.stderr)
