"""The losses of several runs in one picture, and as a table.

    python experiments/loss_curves.py runs/rrt_gemma_b2_* --png losses.png
    python experiments/loss_curves.py runs/a runs/b --kind train --log --png losses.png

Tokens trained on go across. Training losses are smoothed by a moving mean. The papers'
figures of this kind: RT's C4 curves, RRT's Figures 5a, 6a, F.1 and F.2, RecurFormer's
Figure 6.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import read_experiment
from recurjax.files.atomic import write_figure
from recurjax.files.metric_rows import read_rows
from recurjax.training.run import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Draws the runs' losses and prints the last of each.

    Attributes:
      runs: run directories.
      png: the picture.
      kind: validation or train.
      metric: metric of metrics.jsonl, such as exit_1 or divergence.
      smooth: rows of a moving mean of training losses.
      log: tokens on a logarithmic axis.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    png: Path
    kind: Literal["validation", "train"] = "validation"
    metric: str = "loss"
    smooth: int = 10
    log: bool = False

    def __post_init__(self):
        if not self.runs or self.smooth < 1:
            raise UserError("name at least one run, and --smooth of at least 1")


def curve(options: Options, run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens trained on, and the metric there.

    Raises:
      UserError: no run there, or none of its rows has the metric.
    """
    each = read_experiment(run / "config.json").training.tokens_per_step
    rows = [
        row
        for row in read_rows(RunDirectory(run).metrics).rows
        if row["kind"] == options.kind and row.get(options.metric) is not None
    ]
    if not rows:
        raise UserError(
            f"--metric {options.metric}: no {options.kind} row of {run} has it"
        )
    steps = np.array([row["step"] for row in rows]) * each
    values = np.array([row[options.metric] for row in rows], float)
    if options.kind == "train":
        width = min(options.smooth, len(values))
        values = np.convolve(values, np.ones(width) / width, mode="valid")
        steps = steps[width - 1 :]
    return steps, values


def main(argv: list[str] | None = None) -> int:
    """Draws the picture and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="loss_curves.py")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    print(f"| run | tokens | {options.kind} {options.metric} |")
    print("|---|---|---|")
    for run in options.runs:
        steps, values = curve(options, run)
        axes.plot(steps, values, label=run.name)
        print(f"| {run.name} | {steps[-1]:,} | {values[-1]:.4f} |")
    axes.set(xlabel="tokens", ylabel=f"{options.kind} {options.metric}")
    if options.log:
        axes.set_xscale("log")
    axes.legend(fontsize=8)
    write_figure(figure, options.png)
    return 0


if __name__ == "__main__":
    run_script(main)
