"""Length generalisation in miniature: trained at T 256, read to 4 T.

The paper's Fig. 6 on the embedded text, for two CPU cores: the RNN, and attention-SWA
and RAT(16)-SWA with rotations (RoPE) or with positions in the window layers only
(NoPE). In the paper NoPE reads on where RoPE's loss rises, and the RNN is flat. Runs
that `rat_shakespeare.py` made in the same folder are used as they are; the rest is
trained likewise. Writes length.json and length.png there and prints a table.

    python experiments/rat/length_generalisation.py --runs runs/rat_shakespeare

For any other run: `recurjax evaluate RUN --length 1024 --positions 64 --plot FILE`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from rat_shakespeare import small
from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.data.dataset import open_dataset
from recurjax.errors import UserError
from recurjax.evaluation.by_position import (
    Stretch,
    loss_by_position,
    plot_by_position,
)
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.sharding import MeshConfig, make_mesh, placed
from recurjax.training.loop import train
from recurjax.training.run import load_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains what is missing and reads on to `times` the length of training.

    Attributes:
      runs: one run directory each.
      models: rows of runs.py, without shakespeare_.
      steps: steps of each run; None: the table's.
      times: how many times the training length is read.
      positions: positions that share one figure.
    """

    runs: Path = Path("runs/rat_shakespeare")
    models: tuple[str, ...] = (
        "rnn",
        "attention_swa",
        "attention_swa_nope",
        "rat16_swa",
        "rat16_swa_nope",
    )
    steps: int | None = None
    times: int = 4
    positions: int = 64

    def __post_init__(self):
        if not self.models:
            raise UserError("--models must name at least one")
        if self.times < 1 or self.positions < 1:
            raise UserError("--times and --positions must be at least 1")


def main(argv: list[str] | None = None) -> int:
    """Trains, evaluates, writes the files and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="length_generalisation.py")
    console = Console()
    curves: dict[str, list[Stretch]] = {}
    runs = {name: small(name, steps=options.steps) for name in options.models}
    for name, run in runs.items():
        console.rule(name)
        result = train(run, options.runs / name, console=console)
        if result.outcome != "finished":
            console.print("stopped: the same command goes on from here")
            return 130
        curves[name] = _read_on(run, options)
        _write(options.runs / "length.json", curves)
    trained = next(iter(runs.values())).training.length
    plot_by_position(curves, options.runs / "length.png", trained=trained)
    print(markdown(curves, trained), end="")
    return 0


def markdown(curves: dict[str, list[Stretch]], trained: int) -> str:
    """Returns a table of the loss by position, one column a training length."""
    ends = range(trained, next(iter(curves.values()))[-1].stop + 1, trained)
    heads = [f"{end - trained} to {end - 1}" for end in ends]
    lines = [f"| run | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, stretches in curves.items():
        means = [_mean(stretches, end - trained, end) for end in ends]
        lines.append(f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines) + "\n"


def _read_on(run: Experiment, options: Options) -> list[Stretch]:
    loaded = load_run(options.runs / run.name)
    dataset = open_dataset(run.data, tokenizer=loaded.tokenizer)
    length, batch = options.times * run.training.length, 4
    loader = dataset.loader("validation", length=length, batch=batch, in_order=True)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    rows = placed(iter(loader), mesh, batch=batch)
    return loss_by_position(loaded.model, rows, stretch=options.positions)


def _mean(stretches: list[Stretch], start: int, stop: int) -> float:
    inside = [part for part in stretches if start <= part.start and part.stop <= stop]
    nats = sum(part.loss * part.tokens for part in inside)
    return nats / max(sum(part.tokens for part in inside), 1)


def _write(file: Path, curves: dict[str, list[Stretch]]) -> None:
    record = {
        name: [part._asdict() for part in parts] for name, parts in curves.items()
    }
    write_atomic(file, json_text(record, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
