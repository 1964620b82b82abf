"""Tokens that small models need to learn recall: curves, floors, a ranking.

Trains the rows of runs.py, task by mixer by seed, and tests each every `--every` steps
on its 256 rows. A run stops at the first test with 0.9 of the answers right, or once it
has read `--tokens`. Each test is a line of rows.jsonl as soon as it is made; the table
(tokens to 0.9 over the seeds) and one picture a task are drawn from these lines. The
same command continues where it was stopped: it reads the runs that have ended and makes
one that was cut again.

    python experiments/tasks/recall.py --out runs/recall
    python experiments/tasks/recall.py --tasks mqar needles --mixers attention rt lrt \
        --seeds 1 --tokens 1e6

One core trains 10,000 to 20,000 tokens per second (RT and LRT a third to a half of
that), so that a seed of mqar and needles takes about half an hour. The full grid takes
about three days: name tasks and mixers.
"""

import json
import re
import statistics
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.data.batches import Batch
from recurjax.data.tasks import HashHop, TaskConfig, TaskData, TaskDataset
from recurjax.errors import UserError
from recurjax.evaluation.accuracy import accuracy, count_answers
from recurjax.evaluation.hash_hop import read_chains
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic, write_figure
from recurjax.machine import compiled_programs, host
from recurjax.model import count_parameters
from recurjax.run_table import load_experiment, load_runs
from recurjax.sharding import make_mesh, place, placed
from recurjax.training.config import TrainingConfig
from recurjax.training.program import build_step
from recurjax.training.sweep import seeded

TABLE = Path(__file__).with_name("runs.py")
PASSED = 0.9
"""The accuracy at which a task counts as learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains a grid of runs and writes rows.jsonl, results.md and a picture a task.

    Attributes:
      out: the folder for these files.
      tasks: first parts of the names in runs.py; empty: all.
      mixers: second parts of the names; empty: all.
      seeds: runs of each, of initial parameters and of rows.
      rates: learning rates, each a run of its own; empty: that of the row.
      tokens: the most that a run reads; None: as runs.py says.
      every: steps between tests.
    """

    out: Path = Path("runs/recall")
    tasks: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    seeds: int = 3
    rates: tuple[float, ...] = ()
    tokens: float | None = None
    every: int = 25

    def __post_init__(self):
        if min(self.seeds, self.every) < 1 or (self.tokens or 1) < 1:
            raise UserError("--seeds, --every and --tokens must be at least 1")


class Cell(NamedTuple):
    """One run of the grid."""

    task: str
    mixer: str
    rate: float
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A test of a run, a line of rows.jsonl.

    Attributes:
      task, mixer, rate, seed: task, mixer, rate and seed of the run.
      step, tokens: trained until then.
      accuracy: share of right answers; of HashHop, the score of its chains.
      rows_right: share of the rows whose answers are all right.
      loss: loss of the last training step.
      seconds: seconds of training, without compilation and tests.
      end: why the run ended here, "passed" or "budget"; None: it continues.
    """

    task: str
    mixer: str
    rate: float
    seed: int
    parameters: int
    step: int
    tokens: int
    accuracy: float
    rows_right: float
    loss: float
    seconds: float
    end: str | None

    @property
    def cell(self) -> Cell:
        """The run that was tested."""
        return Cell(self.task, self.mixer, self.rate, self.seed)


def lines_of(cell: Cell, run: Experiment, *, every: int) -> Iterator[Line]:
    """Trains a run and yields its tests."""
    mesh, training, batch = make_mesh(run.mesh), run.training, run.evaluation_batch
    step = build_step(run, mesh)
    assert isinstance(run.data, TaskData)
    task, data = run.data.task, TaskDataset(config=run.data)
    length = data.evaluation_length(training.length)
    test = list(
        placed(data.loader("validation", length=length, batch=batch), mesh, batch=batch)
    )
    labels = list(data.labels("validation", batch=batch))
    batches = _rows(run.data, training)
    state = step.initialise(jax.random.key(training.seed))
    seconds, done, end = 0.0, 0, None
    while end is None:
        began, loss = time.monotonic(), float("nan")
        for rows in batches.read(done, every):
            state, metrics = step(state, place(rows, mesh, batch=training.batch))
            # Wait: steps that run ahead of each other on several CPU devices can take
            # all of XLA's threads.
            loss = float(metrics["loss"])
            done += 1
            if done == 1:  # the first step compiles
                began = time.monotonic()
        seconds += time.monotonic() - began
        with jax.set_mesh(mesh):
            counts = [
                count_answers(state.model, rows, objective=run.objective)
                for rows in test
            ]
            result = accuracy(jax.device_get(counts), labels)
            share = result.token
            if isinstance(task, HashHop):
                share = statistics.fmean(
                    read_chains(state.model, test, task, objective=run.objective)
                )
        if share >= PASSED:
            end = "passed"
        elif done >= training.steps:
            end = "budget"
        yield Line(
            **cell._asdict(),
            parameters=count_parameters(run.model).total,
            step=done,
            tokens=done * training.tokens_per_step,
            accuracy=share,
            rows_right=result.sequence,
            loss=loss,
            seconds=round(seconds, 1),
            end=end,
        )


class _Rows:
    """The training batches of a task and a seed; what was drawn is kept."""

    def __init__(self, data: TaskData, training: TrainingConfig):
        self._drawn: list[Batch] = []
        self._more = iter(
            TaskDataset(config=data).loader(
                "train", length=training.length, batch=training.batch
            )
        )
        weakref.finalize(self, self._more.close)  # the threads that read ahead

    def read(self, start: int, count: int) -> list[Batch]:
        """Returns batches `start` to `start + count`."""
        missing = start + count - len(self._drawn)
        self._drawn.extend(islice(self._more, max(0, missing)))
        return self._drawn[start : start + count]


# All mixers read the same rows, and drawing them takes a quarter of a short run.
_rows = lru_cache(maxsize=1)(_Rows)


def read_lines(file: Path) -> dict[Cell, list[Line]]:
    """Reads the tests of each run, of a repeated one the newest."""
    runs: dict[Cell, list[Line]] = {}
    if not file.is_file():
        return runs
    for text in file.read_text(encoding="utf-8").splitlines():
        line = Line(**json.loads(text))
        lines = runs.setdefault(line.cell, [])
        if lines and line.step <= lines[-1].step:
            lines.clear()
        lines.append(line)
    return runs


def has_ended(lines: Sequence[Line], *, tokens: int) -> bool:
    """Returns whether a run has passed or read as many tokens."""
    return bool(lines) and (
        lines[-1].end == "passed"
        or (lines[-1].end == "budget" and lines[-1].tokens >= tokens)
    )


def floor_of(task: TaskConfig) -> float:
    """Returns the floor of what a line calls its accuracy."""
    if isinstance(task, HashHop):
        return task.chain_floor()
    data = TaskDataset(config=TaskData(task=task))
    rows = [data.row("validation", n) for n in range(task.count("validation") or 0)]
    chances = sum(task.chances(row).sum() for row in rows)
    return float(chances / sum((row.targets >= 0).sum() for row in rows))


def markdown(runs: dict[Cell, list[Line]], floors: dict[str, float]) -> str:
    """Returns the table: a row per mixer, a column per task.

    A cell has the tokens to 0.9 of the seeds that reached it, in millions: the mean,
    and the lowest and highest; after it how many of the seeds did, where not all. If
    none did it has their accuracy at the end and the tokens read.
    """
    mixers = list(dict.fromkeys((cell.mixer, cell.rate) for cell in runs))
    head = [f"{task} (floor {floor:.3f})" for task, floor in floors.items()]
    lines = [
        "| M tokens to 0.9 | " + " | ".join(head) + " |",
        "|---" * (len(head) + 1) + "|",
    ]
    several = len(mixers) > len({mixer for mixer, _ in mixers})
    for mixer, rate in mixers:
        cells = []
        for task in floors:
            ended = [
                tests[-1]
                for cell, tests in sorted(runs.items())
                if (cell.task, cell.mixer, cell.rate) == (task, mixer, rate)
                and tests[-1].end is not None
            ]
            cells.append(_table_cell(ended))
        name = f"{mixer}, rate {rate:g}" if several else mixer
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _table_cell(ended: Sequence[Line]) -> str:
    if not ended:
        return ""
    passed = [line.tokens / 1e6 for line in ended if line.end == "passed"]
    seeds = f"{len(passed)} of {len(ended)} seeds" if len(ended) > 1 else "1 seed"
    if not passed:
        shares = ", ".join(f"{line.accuracy:.2f}" for line in ended)
        return f"no: {shares} at {max(line.tokens for line in ended) / 1e6:.1f}"
    spread = f" ({min(passed):.2f}, {max(passed):.2f})" if len(passed) > 1 else ""
    return f"**{statistics.fmean(passed):.2f}**{spread}, {seeds}"


def plot(
    runs: dict[Cell, list[Line]], task: str, png: Path, *, floor: float, seeds: int
) -> None:
    """Draws accuracy over tokens: a color per mixer, a line per seed.

    Mixers after the tenth have dashed lines of the first ones' colors.
    """
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    mine = {cell: lines for cell, lines in runs.items() if cell.task == task}
    labels = list(dict.fromkeys((cell.mixer, cell.rate) for cell in mine))
    several = len(labels) > len({mixer for mixer, _ in labels})
    for number, (mixer, rate) in enumerate(labels):
        name = f"{mixer}, {rate:g}" if several else mixer
        for cell, lines in sorted(mine.items()):
            if (cell.mixer, cell.rate) != (mixer, rate):
                continue
            axes.plot(
                [line.tokens / 1e6 for line in lines],
                [line.accuracy for line in lines],
                color=f"C{number % 10}",
                linestyle="-" if number < 10 else "--",
                linewidth=1.2,
                label=name,
            )
            name = None  # one entry of the legend for all seeds
    axes.axhline(floor, color="black", linestyle=":", label=f"floor {floor:.3f}")
    axes.axhline(PASSED, color="gray", linestyle="--", linewidth=0.8)
    axes.set_xlabel("million tokens")
    axes.set_ylabel("score of chains" if task.startswith("hash_hop") else "accuracy")
    axes.set_ylim(-0.02, 1.02)
    axes.set_title(f"{task}, {seeds} seeds" if seeds > 1 else f"{task}, one seed")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    write_figure(figure, png)


@cache
def _floor(task: str) -> float:
    data = load_experiment(f"{TABLE}:{task}_attention").data
    assert isinstance(data, TaskData)
    return floor_of(data.task)


def write_results(out: Path) -> str:
    """Writes the table and the pictures of all that rows.jsonl holds."""
    runs = read_lines(out / "rows.jsonl")
    floors = {cell.task: _floor(cell.task) for cell in runs}
    for task, floor in floors.items():
        seeds = len({cell.seed for cell in runs if cell.task == task})
        plot(runs, task, out / f"{task}.png", floor=floor, seeds=seeds)
    table = markdown(runs, floors)
    write_atomic(out / "results.md", table)
    return table


def grid(options: Options) -> list[tuple[Cell, Experiment]]:
    """Returns the runs in their order: all of a seed before the next seed.

    Raises:
      UserError: a task or a mixer has no row in runs.py.
    """
    names = list(load_runs(TABLE))
    tasks = options.tasks or tuple(dict.fromkeys(map(_task_of, names)))
    mixers = options.mixers or tuple(
        dict.fromkeys(name.removeprefix(f"{_task_of(name)}_") for name in names)
    )
    runs = []
    for seed in range(options.seeds):
        for task in tasks:
            for mixer in mixers:
                row = seeded(load_experiment(f"{TABLE}:{task}_{mixer}"), seed)
                steps = row.training.steps
                if options.tokens is not None:
                    steps = -(-int(options.tokens) // row.training.tokens_per_step)
                # Full portions between tests.
                steps = -(-steps // options.every) * options.every
                row = replace(row, training=replace(row.training, steps=steps))
                for rate in options.rates or (row.optimizer.learning_rate,):
                    optimizer = replace(row.optimizer, learning_rate=rate)
                    cell = Cell(task, mixer, rate, seed)
                    runs.append((cell, replace(row, optimizer=optimizer)))
    return runs


def _task_of(name: str) -> str:
    """Returns the task of a row's name: what `_attention` and its like end."""
    return _MIXERS.sub("", name)


_MIXERS = re.compile(
    r"(_(attention|swa|rt|lrt|rat\d+|rnn|mamba|memory|recurformer_\d+))+$"
)


def main(argv: list[str] | None = None) -> int:
    """Trains what has not ended yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="recall.py")
    runs, console = grid(options), Console(stderr=True)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rows.jsonl"
    table = write_results(options.out)
    for cell, run in runs:
        lines = read_lines(file).get(cell, [])
        if has_ended(lines, tokens=run.training.steps * run.training.tokens_per_step):
            continue
        console.print(*cell)
        for line in lines_of(cell, run, every=options.every):
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(line)) + "\n")
            console.print(
                f"{line.tokens:,} tokens: {line.accuracy:.3f}, {line.loss:.3f}"
            )
        table = write_results(options.out)
    print(table, end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    # Seeds and rates of one row are one program: it is compiled once.
    compiled_programs.keep()
    run_script(main)
