"""RAT and its relatives at equal tokens on the embedded text, for two CPU cores.

Reproduces no table: the paper's comparison (its Fig. 4, RNN to attention with RAT
between them) in miniature: rows shakespeare_* of runs.py, three seeds. Expect about 15
minutes on two idle cores, and a table of validation bits per byte. A stopped set goes
on with the same command.

    python experiments/rat/rat_shakespeare.py --runs runs/rat_shakespeare
    python experiments/rat/rat_shakespeare.py --models t512_rnn t512_rat64 t512_rat16 \
        t512_attention t512_rat16_swa t512_attention_swa t512_rat16_swa_nope \
        t512_attention_swa_nope
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the small set and prints its table.

    Attributes:
      runs: one run directory each, results.json and results.md.
      models: rows of the table, without shakespeare_.
      steps: steps of each run; None: the table's.
      seeds: how many runs of each, of the init and of the order of the rows.
    """

    runs: Path = Path("runs/rat_shakespeare")
    models: tuple[str, ...] = ("rnn", "rat64", "rat16", "attention", "rat16_swa")
    steps: int | None = None
    seeds: int = 3

    def __post_init__(self):
        if self.seeds < 1:
            raise UserError("--seeds must be at least 1")


def small(model: str, *, steps: int | None) -> Experiment:
    """Returns a row shakespeare_*, as long as is said."""
    run = load_experiment(f"{TABLE}:shakespeare_{model}")
    return shortened(run, steps)


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="rat_shakespeare.py")
    runs = [small(model, steps=options.steps) for model in options.models]
    return sweep_and_print(runs, options.runs, seeds=options.seeds)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
