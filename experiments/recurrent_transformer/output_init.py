"""Should output projections start like the other weights, or divided by sqrt(2 L)?

The paper's branches are scaled by 1/sqrt(L), and its output projections start like the
other weights; dividing them too counts the depth twice. Twelve layers of width 64 of
the Transformer and of the Recurrent Transformer on the embedded text, each with both
inits at three seeds: rows shakespeare_*_12* of runs.py. Nothing was tuned. Expect a
table of validation bits per byte; a stopped set continues with the same command.

    python experiments/recurrent_transformer/output_init.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.machine import host
from recurjax.run_table import load_experiment
from recurjax.training.sweep import shortened, sweep_and_print

TABLE = Path(__file__).with_name("runs.py")
MODELS = ("transformer", "recurrent")
INITS = ("_12", "_12_depth_init")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains both models with both inits and prints the table.

    Attributes:
      runs: one run directory each, results.json and results.md.
      seeds: how many runs of each, of the init and of the order of the rows.
      steps: steps of each run; None: the table's.
    """

    runs: Path = Path("runs/rt_output_init")
    seeds: int = 3
    steps: int | None = None

    def __post_init__(self):
        if self.seeds < 1:
            raise UserError("--seeds must be at least 1")


def rows(*, steps: int | None) -> list[Experiment]:
    """Returns the four rows of the table, as long as is said."""
    names = [f"shakespeare_{model}{init}" for model in MODELS for init in INITS]
    return [shortened(load_experiment(f"{TABLE}:{name}"), steps) for name in names]


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="output_init.py")
    return sweep_and_print(rows(steps=options.steps), options.runs, seeds=options.seeds)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
