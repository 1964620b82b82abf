"""The memory at equal tokens and at equal compute, for two CPU cores.

The paper's comparison in miniature, rows shakespeare_* of runs.py: the backbone, the
backbone with twice the tokens (what a pass of refinement costs), LRT-shared,
LRT-layerwise, and chunked training, on the embedded text. Expect a table of validation
bits per byte, each position by its last pass; a stopped set continues with the same
command. The exact recurrence's figure of a run comes from `recurjax evaluate RUN`.

    python experiments/latent_recurrent_transformer/latent_shakespeare.py

The ablations of Tables 1, 2, 3 and 9 are rows too, each a change of LRT-shared:

    python experiments/latent_recurrent_transformer/latent_shakespeare.py --models \
        shared source_1 source_3 source_4 source_average lag_2 lag_average \
        residual_only projection_only subsets_4 --runs runs/lrt_ablations
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.machine import host
from recurjax.run_table import load_experiment
from recurjax.training.sweep import sweep_and_print

TABLE = Path(__file__).with_name("runs.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the small set and prints its table.

    Attributes:
      runs: one run directory each, results.json and results.md.
      models: rows of the table, without shakespeare_.
      steps: steps of each run, twice as many for base_2x; None: the table's.
      seeds: how many runs of each, of the init and of the order of the rows.
    """

    runs: Path = Path("runs/lrt_shakespeare")
    models: tuple[str, ...] = ("base", "base_2x", "shared", "layerwise", "chunked")
    steps: int | None = None
    seeds: int = 3

    def __post_init__(self):
        if self.seeds < 1:
            raise UserError("--seeds must be at least 1")


def small(model: str, *, steps: int | None) -> Experiment:
    """Returns a row shakespeare_*, as long as is said."""
    run = load_experiment(f"{TABLE}:shakespeare_{model}")
    if steps is None:
        return run
    times = 2 if model == "base_2x" else 1
    return replace(run, training=replace(run.training, steps=times * steps))


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="latent_shakespeare.py")
    runs = [small(model, steps=options.steps) for model in options.models]
    return sweep_and_print(runs, options.runs, seeds=options.seeds)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
