"""The paper's tuning of a C4 run: three learning rates by two beta2, the best counts.

    python experiments/recurrent_transformer/c4_grid.py --run c4_150m_recurrent_12

Trains six runs of a row of runs.py, one after another, and prints a table of validation
losses; on a pod each can be started by itself, `recurjax train ...runs.py:NAME
--optimizer.learning-rate 1e-2 --optimizer.b2 0.99`. A stopped set continues with the
same command. Expect the row's figure at 3e-3. Source: appendix "C4 pretraining
experiments".
"""

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from recurjax.cli.options import parse, run_script
from recurjax.experiment import Experiment
from recurjax.machine import host
from recurjax.run_table import load_experiment
from recurjax.training.optimizers import Adam
from recurjax.training.sweep import sweep_and_print

TABLE = Path(__file__).with_name("runs.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains a row at every rate and beta2 and prints the table.

    Attributes:
      run: a row of runs.py.
      runs: one run directory each, results.json and results.md.
      rates: peak learning rates.
      beta2: Adam's beta2.
    """

    run: str = "c4_300m_recurrent_12"
    runs: Path = Path("runs/rt_c4_grid")
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    beta2: tuple[float, ...] = (0.95, 0.99)


def grid(options: Options) -> list[Experiment]:
    """Returns the row at every pair, named after it."""
    row = load_experiment(f"{TABLE}:{options.run}")
    assert isinstance(row.optimizer, Adam)
    return [
        replace(
            row,
            name=f"{row.name}_rate{rate:g}_b2{b2:g}",
            optimizer=replace(row.optimizer, learning_rate=rate, b2=b2),
        )
        for rate, b2 in product(options.rates, options.beta2)
    ]


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="c4_grid.py")
    return sweep_and_print(grid(options), options.runs)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
