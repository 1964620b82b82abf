"""A looped RAT against RAT at equal parameters and at equal FLOPs, three seeds.

No table of a paper. `looped` runs a block of four RAT layers twice. `rat_4`, the four
layers once, has its parameters and half its FLOPs; `rat_8`, eight layers, has its FLOPs
and twice its layers' parameters. `looped_rank16` adds LoRA of rank 16 and own norms to
each depth. Width 128 with four heads, chunks of 16, over bytes, 256 in a row; one rate
for all, nothing is tuned. The questions: how much of eight layers does a loop over four
recover, and with LoRA? english_text.py makes a text. Writes results.md. A stopped set
continues with the same command.

    python experiments/relaxed_recursive_transformer/loop_over_rat.py english.txt
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.layers.initialization import UNIT_VARIANCE
from recurjax.layers.mlp import MlpConfig
from recurjax.machine import host
from recurjax.model import ModelConfig, StackConfig
from recurjax.training.sweep import sweep_and_print, trained_on_bytes
from recurjax.variants.rat import RatConfig, presets
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)

LAYERS, LOOPS, WIDTH, HEADS, CHUNK = 8, 2, 128, 4, 16
LENGTH, BATCH = 256, 16
Name = Literal["rat_4", "looped", "looped_rank16", "rat_8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the models and prints their table.

    Attributes:
      text: UTF-8; its last twentieth is for validation.
      runs: one run directory each, results.json and results.md.
      models: which of the four.
      tokens: tokens that each reads, in all.
      seeds: runs of each.
      rate: the peak of the learning rate.
    """

    text: Annotated[Path, tyro.conf.Positional]
    runs: Path = Path("runs/loop_over_rat")
    models: tuple[Name, ...] = get_args(Name)
    tokens: int = 5_000_000
    seeds: int = 3
    rate: float = 3e-3

    def __post_init__(self):
        if self.tokens < BATCH * LENGTH or self.seeds < 1:
            raise UserError(
                f"--tokens must be at least {BATCH * LENGTH}, a step's, and --seeds 1"
            )


def stack(name: Name) -> StackConfig:
    """Returns a model's layers."""

    def rat(layers: int) -> RatConfig:
        return RatConfig(
            layers=layers,
            width=WIDTH,
            pattern=(presets.rat(width=WIDTH, heads=HEADS, chunk=CHUNK),),
            mlp=MlpConfig(width=4 * WIDTH),
            init=UNIT_VARIANCE,
        )

    match name:
        case "rat_4":
            return rat(LAYERS // LOOPS)
        case "rat_8":
            return rat(LAYERS)
        case "looped":
            return RelaxedRecursiveTransformerConfig(
                transformer=rat(LAYERS), loops=LOOPS
            )
        case "looped_rank16":
            return RelaxedRecursiveTransformerConfig(
                transformer=rat(LAYERS), loops=LOOPS, rank=16, tie_norms=False
            )


def experiment(name: Name, options: Options) -> Experiment:
    """Returns a model's run."""
    return trained_on_bytes(
        name,
        ModelConfig(vocabulary=256, stack=stack(name)),
        text=options.text,
        tokens=options.tokens,
        batch=BATCH,
        length=LENGTH,
        learning_rate=options.rate,
    )


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="loop_over_rat.py")
    runs = [experiment(name, options) for name in options.models]
    return sweep_and_print(runs, options.runs, seeds=options.seeds)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
