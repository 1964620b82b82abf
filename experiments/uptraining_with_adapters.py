"""Uptrains a recursive model and a RecurFormer with adapters, and in full.

A Transformer becomes a block run twice, with LoRA per depth, and a model with half of
its heads as Mamba. Both train further on a text: all parameters, as in the papers, or
adapters of rank 16 with what the conversion has added (RRT's LoRA and norms,
RecurFormer's Mambas). The base trains further as well. Prints bits per byte on the
text's last tenth. A stopped set continues with the same command.

    python experiments/english_variants.py english.txt --variants transformer --seeds 1
    python experiments/uptraining_with_adapters.py runs/english/transformer english.txt
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from recurjax.cli.main import main as recurjax
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.machine import host
from recurjax.training.sweep import sweep_and_print, trained_further

BATCH, LENGTH = 16, 256
ADAPTERS = "lora:16:32"
CONVERSIONS = {
    "to-recursive": ("--loops", "2", "--rank", "16", "--init", "average"),
    "to-recurformer": ("--beta", "0.5", "--dt-rank", "16", "--length", "256"),
}
ADDED = {"to-recursive": "adapters|norm", "to-recurformer": "mamba"}
"""Patterns of what a conversion adds, or gives each depth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Converts, trains what is not trained yet and prints the table.

    Attributes:
      base: run directory of a Transformer.
      text: UTF-8; its last tenth is for validation.
      runs: one run directory each, and results.md.
      tokens: tokens that each reads.
      rates: peaks of the learning rate, each tried by all.
      seeds: orders of the rows.
    """

    base: Annotated[Path, tyro.conf.Positional]
    text: Annotated[Path, tyro.conf.Positional]
    runs: Path = Path("runs/uptraining_with_adapters")
    tokens: int = 400_000
    rates: tuple[float, ...] = (1e-3, 3e-3)
    seeds: int = 3


def convert(options: Options, conversion: str) -> Path:
    """Returns the converted run, made before or now."""
    out = options.runs / f"start_{conversion}"
    if not out.exists():
        words = ["convert", conversion, options.base, out, *CONVERSIONS[conversion]]
        if recurjax([*map(str, words), "--text", str(options.text)]):
            raise UserError(f"the conversion to {out} failed")
    return out


def experiments(options: Options) -> list[Experiment]:
    """Returns the base's, the conversions' and the adapters' runs at each rate."""

    def further(start: Path, name: str, rate: float) -> Experiment:
        return trained_further(
            start,
            f"{name}_{rate:g}",
            text=options.text,
            tokens=options.tokens,
            batch=BATCH,
            length=LENGTH,
            learning_rate=rate,
        )

    runs = [further(options.base, "base_full", rate) for rate in options.rates]
    for conversion in CONVERSIONS:
        start = convert(options, conversion)
        for rate in options.rates:
            full = further(start, f"{conversion}_full", rate)
            thin = further(start, f"{conversion}_adapters", rate)
            training = replace(
                thin.training, adapters=ADAPTERS, train_only=ADDED[conversion]
            )
            runs += [full, replace(thin, training=training)]
    return runs


def main(argv: list[str] | None = None) -> int:
    """Runs the set."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="uptraining_with_adapters.py")
    return sweep_and_print(experiments(options), options.runs, seeds=options.seeds)


if __name__ == "__main__":
    host.prepare()
    run_script(main)
