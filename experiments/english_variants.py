"""The six variants on English text at equal parameters and tokens, three seeds.

Four layers of width 128 with four heads over bytes, 256 in a row; the MLP's width makes
all models as large as the Transformer within half a percent (RRT's is a block of two
layers, run twice). Positions are each paper's own. One rate for all, nothing is tuned;
LRT makes two passes over the tokens. Reproduces no table: it shows what the papers
compare on text, at a scale for two CPU cores. english_text.py makes the text.

Writes results.md and english.png, bits per byte over tokens and over time, for which
steps of all variants are measured in turns once the set is trained (seconds.json). A
stopped set continues with the same command.

    python experiments/english_variants.py english.txt --runs runs/english
"""

import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from recurjax.bench.trainer import steps_in_turns
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic, write_figure
from recurjax.files.metric_rows import read_rows
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import UNIT_VARIANCE
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.machine import host
from recurjax.model import ModelConfig, StackConfig, count_parameters
from recurjax.surgery.recency import first_heads
from recurjax.training.objective import Interleaved
from recurjax.training.run import RunDirectory
from recurjax.training.sweep import seeded, sweep_and_print, trained_on_bytes
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.presets import FINAL_NORM, shared
from recurjax.variants.rat import RatConfig, presets
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 4, 128, 4, 256, 16
MLP_WIDTH = 512
"""Of the Transformer, as large as which the others are made."""
Name = Literal["transformer", "rt", "lrt", "rat16", "rrt", "recurformer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the variants and prints their table.

    Attributes:
      text: UTF-8; its last twentieth is for validation.
      runs: one run directory each, results.md, seconds.json and english.png.
      variants: which of the six.
      tokens: tokens that each reads, in all.
      seeds: runs of each.
      rate: the peak of the learning rate.
    """

    text: Annotated[Path, tyro.conf.Positional]
    runs: Path = Path("runs/english")
    variants: tuple[Name, ...] = get_args(Name)
    tokens: int = 5_000_000
    seeds: int = 3
    rate: float = 3e-3

    def __post_init__(self):
        if self.tokens < BATCH * LENGTH or self.seeds < 1:
            raise UserError(
                f"--tokens must be at least {BATCH * LENGTH}, a step's, and --seeds 1"
            )


def stack(name: Name, mlp_width: int) -> StackConfig:
    """Returns a variant's four layers."""
    size: dict[str, Any] = {"layers": LAYERS, "width": WIDTH, "init": UNIT_VARIANCE}
    heads: dict[str, Any] = {"heads": HEADS, "key_heads": HEADS}
    heads["head_width"] = WIDTH // HEADS
    mlp = MlpConfig(kind="gelu", width=mlp_width)
    transformer = TransformerConfig(**size, attention=AttentionConfig(**heads), mlp=mlp)
    match name:
        case "transformer":
            return transformer
        case "rt":
            return RecurrentTransformerConfig(**size, **heads, mlp=mlp)
        case "lrt":
            return LatentRecurrentTransformerConfig(
                **size,
                **heads,
                mlp_width=mlp_width,
                vocabulary=256,
                length=LENGTH,
                windows="L",
                value_embeddings="none",
                residual_scales=False,
                input_mixing="none",
                memory=shared(LAYERS),
            )
        case "rat16":
            mixer = presets.rat(width=WIDTH, heads=HEADS, chunk=16)
            return RatConfig(**size, pattern=(mixer,), mlp=mlp)
        case "rrt":
            return RelaxedRecursiveTransformerConfig(transformer=transformer, loops=2)
        case "recurformer":
            return RecurFormerConfig(
                transformer=transformer,
                replaced=first_heads(LAYERS, HEADS, 0.5),
                mamba=MambaConfig(dt_rank=16),
            )


def model(name: Name) -> ModelConfig:
    """Returns a variant's model, as large as the Transformer's."""

    def of_width(mlp_width: int) -> ModelConfig:
        norm = FINAL_NORM if name == "lrt" else NormConfig()
        return ModelConfig(
            vocabulary=256, stack=stack(name, mlp_width), final_norm=norm
        )

    if name == "transformer":
        return of_width(MLP_WIDTH)
    # The size is linear in the width.
    least = count_parameters(of_width(1)).total
    each = count_parameters(of_width(2)).total - least
    parameters = count_parameters(model("transformer")).total
    return of_width(1 + round((parameters - least) / each))


def experiment(name: Name, options: Options) -> Experiment:
    """Returns a variant's run."""
    run = trained_on_bytes(
        name,
        model(name),
        text=options.text,
        tokens=options.tokens,
        batch=BATCH,
        length=LENGTH,
        learning_rate=options.rate,
    )
    return replace(run, objective=Interleaved(subsets=2)) if name == "lrt" else run


def step_seconds(runs: list[Experiment], root: Path) -> dict[str, float]:
    """Returns the least seconds of a step, in turns, or as measured before."""
    file = root / "seconds.json"
    seconds = json.loads(file.read_text()) if file.is_file() else {}
    if missing := {run.name: run for run in runs if run.name not in seconds}:
        times = steps_in_turns(missing, repeats=5)
        seconds |= {name: min(each) for name, each in times.items()}
        write_atomic(file, json.dumps(seconds, indent=2))
    return seconds


def plot(runs: list[Experiment], options: Options, png: Path) -> None:
    """Draws bits per byte over tokens and over minutes, the mean over the seeds."""
    from matplotlib.figure import Figure  # slow to import

    seconds = step_seconds(runs, options.runs)
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    for run in runs:
        bits: dict[int, list[float]] = {}
        for seed in range(options.seeds):
            directory = RunDirectory(options.runs / seeded(run, seed).name)
            for row in read_rows(directory.metrics).rows:
                if row["kind"] == "validation":
                    bits.setdefault(row["step"], []).append(row["bits_per_byte"])
        steps, means = sorted(bits), [statistics.fmean(bits[n]) for n in sorted(bits)]
        tokens = [n * run.training.tokens_per_step / 1e6 for n in steps]
        by_tokens.plot(tokens, means, label=run.name)
        by_time.plot([n * seconds[run.name] / 60 for n in steps], means, label=run.name)
    by_tokens.set_xlabel("million tokens")
    by_tokens.set_ylabel("validation bits per byte")
    by_time.set_xlabel("minutes of training")
    by_tokens.legend(fontsize=8)
    write_figure(figure, png)


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet, prints the table and draws the picture."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="english_variants.py")
    runs = [experiment(name, options) for name in options.variants]
    status = sweep_and_print(runs, options.runs, seeds=options.seeds)
    if status == 0:
        plot(runs, options, options.runs / "english.png")
    return status


if __name__ == "__main__":
    host.prepare()
    run_script(main)
