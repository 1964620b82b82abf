"""Several runs under one folder, one after another, and the table of what they reach.

Each run resumes by itself, so a sweep that was stopped goes on where it stood. What is
told of a run is read from its own files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from recurjax.experiment import Experiment
from recurjax.files import write_whole
from recurjax.model import count_parameters
from recurjax.training.loop import train
from recurjax.training.run_directory import RunDirectory


class Reached(NamedTuple):
    """What a finished run reached.

    Attributes:
      name: of the experiment.
      parameters: in all.
      tokens: trained on.
      loss: validation, in nats a token.
      bits_per_byte: validation.
      tokens_per_second: of training, without compilation and evaluations.
    """

    name: str
    parameters: int
    tokens: int
    loss: float
    bits_per_byte: float
    tokens_per_second: float


def sweep(
    experiments: Sequence[Experiment], root: Path, *, console: Console
) -> list[Reached] | None:
    """Trains every experiment in `root/<name>` and writes what they reached.

    Args:
      experiments: with names that differ.
      root: gets results.json and results.md, anew after each run.
      console: tells of each run as `train` does.

    Returns:
      One entry a run; None when a run was stopped: the same call goes on from there.

    Raises:
      UserError: as `train`; a run there has another config.
    """
    reached = []
    for experiment in experiments:
        console.rule(experiment.name)
        result = train(experiment, root / experiment.name, console=console)
        if result.outcome != "finished":
            return None
        reached.append(read_reached(experiment, root / experiment.name))
        write_whole(root / "results.json", _json(reached))
        write_whole(root / "results.md", markdown(reached))
    return reached


def sweep_and_print(experiments: Sequence[Experiment], root: Path) -> int:
    """Does what a script of a small set does: `sweep`, then the table on stdout.

    Returns:
      The process's exit status: 0, or 130 when a run was stopped.
    """
    console = Console()
    reached = sweep(experiments, root, console=console)
    if reached is None:
        console.print("stopped: the same command goes on from here")
        return 130
    print(markdown(reached), end="")
    return 0


def read_reached(experiment: Experiment, root: Path) -> Reached:
    """Reads what a finished run reached from its metrics.jsonl."""
    rows = [
        json.loads(line) for line in RunDirectory(root).metrics.read_text().splitlines()
    ]
    steps = experiment.training.steps
    last = {row["kind"]: row for row in rows if row["step"] == steps}
    return Reached(
        name=experiment.name,
        parameters=count_parameters(experiment.model).total,
        tokens=steps * experiment.training.tokens_per_step,
        loss=last["validation"]["loss"],
        bits_per_byte=last["validation"]["bits_per_byte"],
        tokens_per_second=last["train"].get("tokens_per_second", 0.0),
    )


def markdown(reached: Sequence[Reached]) -> str:
    """Returns a Markdown table of the runs."""
    lines = [
        "| run | parameters | tokens | validation bits per byte | tokens/s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.name} | {run.parameters:,} | {run.tokens:,} | "
        f"{run.bits_per_byte:.3f} | {run.tokens_per_second:,.0f} |"
        for run in reached
    ]
    return "\n".join(lines) + "\n"


def _json(reached: Sequence[Reached]) -> str:
    return json.dumps([run._asdict() for run in reached], indent=2) + "\n"
