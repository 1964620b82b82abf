"""What six small models learn of six small tasks: rows of runs.py, three seeds.

Each model's rate on each task is the best of --rates at seed 0, by the accuracy of its
test; the other seeds train at that one. Expect a table of accuracies (the mean, and the
lowest and highest seed) after about two hours on two idle cores. `s3 to 4 T` is the
same model read on to four times the rows that it learned from; a second table has the
share of whole rows. A stopped set goes on with the same command. Rows of another table
of tasks go the same way: the Recurrent Transformer's layer and the Transformer's on
MAD, for a thousand steps instead of 20,000.

    python experiments/tasks/small.py --runs runs/tasks
    python experiments/tasks/small.py --tasks copy recall --rates 3e-3 --seeds 1
    python experiments/tasks/small.py --runs runs/mad --steps 1000 --batch 32 \
        --table experiments/recurrent_transformer/runs.py --rates 1e-3 \
        --models transformer recurrent --tasks mad_copy mad_in_context_recall
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from recurjax.cli.options import parse
from recurjax.data.tasks import StateTracking, TaskData, TaskDataset
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import score
from recurjax.experiment import Experiment, read_experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json_object
from recurjax.machine import compiled_programs, host
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment
from recurjax.sharding import MeshConfig, placed, reading_mesh
from recurjax.training.loop import train
from recurjax.training.run import RunDirectory, load_run
from recurjax.training.sweep import (
    last_validation,
    seeded,
    shortened,
    table_of,
    tell,
)

TABLE = Path(__file__).with_name("runs.py")
FURTHER = 4
"""How many times the learned length the state-tracking task is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the small set and prints its table.

    Attributes:
      runs: one run directory each, and results.md.
      tasks: the first parts of the names of runs.py's rows.
      models: the last parts.
      rates: learning rates to choose from; the first of them is trained first.
      seeds: how many runs of each, of the init and of the rows.
      steps: of each run; None: the table's.
      batch: rows of a step; None: the table's.
      table: the file of the rows.
    """

    runs: Path = Path("runs/tasks")
    tasks: tuple[str, ...] = (
        *("copy", "s3", "selective_copying"),
        *("recall", "mqar", "needles"),
    )
    models: tuple[str, ...] = ("rt", "lrt", "rat16", "rnn", "attention", "swa")
    rates: tuple[float, ...] = (3e-3, 1e-3, 1e-2)
    seeds: int = 3
    steps: int | None = None
    batch: int | None = None
    table: Path = TABLE

    def __post_init__(self):
        if self.seeds < 1 or not (self.rates and self.tasks and self.models):
            raise UserError(
                "--seeds must be at least 1, and --rates, --tasks and --models name "
                "at least one each"
            )
        if not all(rate > 0 and math.isfinite(rate) for rate in self.rates):
            raise UserError(f"--rates must be positive numbers, got {self.rates}")


class Cell(NamedTuple):
    """A model on a task."""

    task: str
    model: str


class Figures(NamedTuple):
    """What a run reached on the test.

    Attributes:
      accuracy: of the answers.
      whole_rows: the share of rows whose answers are all right.
      loss: nats an answer; infinite, where training diverged.
      longer: the accuracy of rows of FURTHER times the length; None: not read.
    """

    accuracy: float
    whole_rows: float
    loss: float
    longer: float | None = None


Found = dict[Cell, dict[tuple[int, float], Figures]]
"""Figures of a cell's finished runs, by (seed, rate)."""


def experiment_of(
    options: Options, cell: Cell, *, seed: int, rate: float
) -> Experiment:
    """Returns a row of the table at a seed and a rate, as long as is said."""
    row = load_experiment(f"{options.table}:{cell.task}_{cell.model}")
    name = f"{cell.task}_{cell.model}_{rate:g}"
    run = shortened(replace(row, name=name), options.steps)
    if options.batch is not None:
        run = replace(run, training=replace(run.training, batch=options.batch))
    return seeded(
        replace(run, optimizer=replace(run.optimizer, learning_rate=rate)), seed
    )


def best_rate(runs: dict[tuple[int, float], Figures]) -> float:
    """Returns seed 0's rate of the highest accuracy, at a tie of the lowest loss."""
    tried = {rate: figures for (seed, rate), figures in runs.items() if seed == 0}
    return max(tried, key=lambda rate: (tried[rate].accuracy, -tried[rate].loss))


def in_turn(options: Options, scores: Found) -> Iterator[tuple[Cell, int, float]]:
    """Yields runs so that a table is whole early: all rates in turn, then seeds."""
    cells = [Cell(task, model) for task in options.tasks for model in options.models]
    for rate in options.rates:
        yield from ((cell, 0, rate) for cell in cells)
    for seed in range(1, options.seeds):
        for cell in cells:
            # Asked for only now: all rates of seed 0 are known.
            yield cell, seed, best_rate(scores[cell])


def is_finished(run: Experiment, root: Path) -> bool:
    """Tells whether this very run has been trained and tested there to its end."""
    directory = RunDirectory(root)
    if not (directory.config.is_file() and directory.metrics.is_file()):
        return False
    tested = last_validation(root)
    steps = run.training.steps
    return tested.get("step") == steps and read_experiment(directory.config) == run


def read_further(root: Path, *, report: Console) -> float:
    """Returns the accuracy of a state-tracking run on rows of FURTHER times its own.

    It is kept beside the run, as read_further.json: a set that goes on reads it there.
    """
    file = root / "read_further.json"
    if file.is_file():
        return float(read_json_object(file, "the accuracy of longer rows")["accuracy"])
    loaded = load_run(root, report=report.print)
    data, training = loaded.experiment.data, loaded.experiment.training
    assert isinstance(data, TaskData) and isinstance(data.task, StateTracking)
    length, batch = FURTHER * training.length, loaded.experiment.evaluation_batch
    task = replace(data.task, validation_length=length)
    rows = TaskDataset(config=replace(data, task=task))
    mesh = reading_mesh(MeshConfig(data=1))
    result = score(
        loaded.model,
        placed(
            rows.loader("validation", length=length, batch=batch), mesh, batch=batch
        ),
        token_bytes=rows.tokenizer.token_bytes,
        objective=loaded.experiment.objective,
        labels=rows.labels("validation", batch=batch),
    )
    assert result.accuracy is not None
    write_atomic(file, json_text({"accuracy": result.accuracy.token}) + "\n")
    return result.accuracy.token


def figures_of(cell: Cell, root: Path, *, report: Console) -> Figures:
    """Reads what a finished run reached."""
    row = last_validation(root)
    loss = row["loss"]
    return Figures(
        accuracy=row["accuracy"],
        whole_rows=row["sequence_accuracy"],
        loss=loss if loss is not None and math.isfinite(loss) else math.inf,
        longer=read_further(root, report=report) if cell.task == "s3" else None,
    )


def markdown(options: Options, scores: Found) -> str:
    """Returns the accuracies, the rates chosen, and how large the models are."""
    chosen = {cell: best_rate(runs) for cell, runs in scores.items()}
    answers: dict[str, list[dict[str, float]]] = {}
    rows: dict[str, list[dict[str, float]]] = {}
    for (cell, rate), seed in product(chosen.items(), range(options.seeds)):
        figures = scores[cell].get((seed, rate))
        if figures is None:
            continue
        answer = {cell.task: figures.accuracy}
        if figures.longer is not None:
            answer[f"{cell.task} to {FURTHER} T"] = figures.longer
        tell(answers, cell.model, seed, answer)
        tell(rows, cell.model, seed, {cell.task: figures.whole_rows})
    lines = [
        table_of("accuracy", answers),
        table_of("whole rows", rows),
        "| rate | " + " | ".join(options.tasks) + " |",
    ]
    lines.append("|---" * (len(options.tasks) + 1) + "|")
    for model in answers:
        rates = (chosen.get(Cell(task, model)) for task in options.tasks)
        columns = ("" if rate is None else f"{rate:g}" for rate in rates)
        lines.append(f"| {model} | " + " | ".join(columns) + " |")
    sizes = [
        count_parameters(experiment_of(options, cell, seed=0, rate=1.0).model).total
        for cell in scores
        if cell.task == options.tasks[0]
    ]
    lines.append(
        f"\n{min(sizes):,} to {max(sizes):,} parameters (of {options.tasks[0]}); "
        f"rates {', '.join(f'{rate:g}' for rate in options.rates)} at seed 0"
    )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="small.py")
    console, scores = Console(stderr=True), {}
    for cell, seed, rate in in_turn(options, scores):
        run = experiment_of(options, cell, seed=seed, rate=rate)
        console.rule(run.name)
        root = options.runs / run.name
        # `train` would find out too, but reads the whole checkpoint for it.
        if not is_finished(run, root) and (
            train(run, root, console=console).outcome != "finished"
        ):
            console.print("stopped: the same command goes on from here")
            return 130
        figures = figures_of(cell, root, report=console)
        scores.setdefault(cell, {})[seed, rate] = figures
        write_atomic(options.runs / "results.md", markdown(options, scores))
    print(markdown(options, scores), end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    # Seeds of one model and rate are one program: it is compiled once.
    compiled_programs.keep()
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"small.py: {error}")
