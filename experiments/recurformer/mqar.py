"""MQAR in miniature: how much attention does recall need?

The paper's figure 7 for two CPU cores: rows small_mqar_* of runs.py, trained from
nothing on 4, 8 and 16 pairs in 64 tokens and tested on 32 in 128 too, beta the share of
heads that are Mamba from the start. Expect accuracy as at beta 0 wherever some
attention is left. Mamba's convolution may give a value the key before it; `--conv 1`
takes that away. A stopped set continues with the same command.

    python experiments/recurformer/mqar.py --runs runs/recurformer_mqar
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.data.tasks import Mqar, TaskData
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.machine import host
from recurjax.run_table import load_experiment
from recurjax.training.loop import train
from recurjax.training.sweep import (
    last_validation,
    seeded,
    shortened,
    table_of,
)
from recurjax.variants.recurformer import RecurFormerConfig

TABLE = Path(__file__).with_name("runs.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the small set and prints accuracy by the number of pairs.

    Attributes:
      runs: one run directory each, and results.md.
      betas: shares of heads, in percent, as runs.py names them.
      conv: width of Mamba's convolution; 1: each position by itself.
      steps: steps of each run; None: the table's.
      seeds: how many runs of each, of the init and of the rows.
    """

    runs: Path = Path("runs/recurformer_mqar")
    betas: tuple[str, ...] = ("00", "25", "50", "75", "100")
    conv: int = 4
    steps: int | None = None
    seeds: int = 3

    def __post_init__(self):
        if self.seeds < 1 or self.conv < 1:
            raise UserError("--seeds and --conv must be at least 1")


def small(beta: str, seed: int, *, steps: int | None, conv: int = 4) -> Experiment:
    """Returns a row small_mqar_beta_*, of a seed, a length and a convolution."""
    run = load_experiment(f"{TABLE}:small_mqar_beta_{beta}")
    name, stack = f"beta_{beta}", run.model.stack
    if conv != 4 and isinstance(stack, RecurFormerConfig):
        name += f"_conv{conv}"
        stack = replace(stack, mamba=replace(stack.mamba, conv=conv))
        run = replace(run, model=replace(run.model, stack=stack))
    return replace(seeded(shortened(run, steps), seed), name=f"{name}_seed{seed}")


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="mqar.py")
    console, scores = Console(stderr=True), {}
    # The seed changes last, so that a table of one seed is complete first.
    for seed in range(options.seeds):
        for beta in options.betas:
            run = small(beta, seed, steps=options.steps, conv=options.conv)
            console.rule(run.name)
            root = options.runs / run.name
            if train(run, root, console=console).outcome != "finished":
                console.print("stopped: the same command goes on from here")
                return 130
            row, data = last_validation(root), run.data
            assert isinstance(data, TaskData) and isinstance(data.task, Mqar)
            settings = data.task.validation
            names = [f"{each.length}; {each.pairs}" for each in settings]
            # Without the keys, any of the row's values.
            floors = {n: 1 / s.pairs for n, s in zip(names, settings, strict=True)}
            scores.setdefault("floor", [floors])
            shares = {
                name: row[f"accuracy/pairs={setting.pairs}"]
                for name, setting in zip(names, settings, strict=True)
            }
            scores.setdefault(f"beta {int(beta) / 100}", []).append(shares)
            text = table_of("accuracy at (tokens; pairs)", scores)
            write_atomic(options.runs / "results.md", text)
    print(table_of("accuracy at (tokens; pairs)", scores), end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
