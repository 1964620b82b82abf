"""Stateful training: rows that go on in the next step, against rows that stand alone.

Each variant trains twice on the embedded text, for the same steps and tokens: on rows
of 64 bytes, and with `training.carry` 8, where steps read rows of 512 bytes 64 at a
time with the cache of the bytes before. Both then read rows of 512 bytes of the
validation text, and the table has bits per byte by position. Two layers of width 128;
nothing is tuned. Reproduces no table. A stopped set continues with the same command.

    python experiments/stateful_training.py --runs runs/stateful
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from rich.console import Console

from recurjax.cli.options import parse, run_script
from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.data.dataset import open_dataset
from recurjax.errors import UserError
from recurjax.evaluation.by_position import loss_by_position
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json_object
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import UNIT_VARIANCE
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.machine import host
from recurjax.model import ModelConfig, StackConfig
from recurjax.sharding import MeshConfig, make_mesh, placed
from recurjax.surgery.recency import first_heads
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.loop import train
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.run import load_run
from recurjax.training.sweep import seeded, table_of, tell
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.objectives import Chunked
from recurjax.variants.latent_recurrent_transformer.presets import FINAL_NORM, shared
from recurjax.variants.rat import RatConfig, presets
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.transformer import TransformerConfig

LAYERS, WIDTH, HEADS, LENGTH, BATCH, CARRY = 2, 128, 4, 64, 32, 8
Name = Literal["rnn", "mamba", "recurformer", "rat16", "rt", "lrt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the variants with and without a carried cache, and prints their table.

    Attributes:
      runs: one run directory each, and results.md.
      variants: which ones: "mamba" has no attention, "recurformer" half of its heads,
        "rat16" chunks of 16.
      steps: steps of each run, 2,048 tokens each.
      seeds: runs of each.
      rate: the peak of the learning rate.
    """

    runs: Path = Path("runs/stateful")
    variants: tuple[Name, ...] = get_args(Name)
    steps: int = 300
    seeds: int = 3
    rate: float = 3e-3

    def __post_init__(self):
        if self.steps < 1 or self.seeds < 1:
            raise UserError("--steps and --seeds must be at least 1")


def stack(name: Name) -> StackConfig:
    """Returns a variant's layers."""
    size: dict[str, Any] = {"layers": LAYERS, "width": WIDTH, "init": UNIT_VARIANCE}
    heads: dict[str, Any] = {"heads": HEADS, "key_heads": HEADS}
    heads["head_width"] = WIDTH // HEADS
    mlp = MlpConfig(kind="gelu", width=4 * WIDTH)
    match name:
        case "rnn":
            mixer = presets.rnn(width=WIDTH, heads=HEADS, length=LENGTH)
            return RatConfig(**size, pattern=(mixer,), mlp=mlp)
        case "rat16":
            mixer = presets.rat(width=WIDTH, heads=HEADS, chunk=16)
            return RatConfig(**size, pattern=(mixer,), mlp=mlp)
        case "mamba" | "recurformer":
            attention = AttentionConfig(**heads)
            replaced = first_heads(LAYERS, HEADS, 1.0 if name == "mamba" else 0.5)
            return RecurFormerConfig(
                transformer=TransformerConfig(**size, attention=attention, mlp=mlp),
                replaced=replaced,
                mamba=MambaConfig(dt_rank=16),
            )
        case "rt":
            return RecurrentTransformerConfig(**size, **heads, mlp=mlp)
        case "lrt":
            return LatentRecurrentTransformerConfig(
                **size,
                **heads,
                mlp_width=4 * WIDTH,
                vocabulary=256,
                length=LENGTH,
                windows="L",
                value_embeddings="none",
                residual_scales=False,
                input_mixing="none",
                memory=shared(LAYERS),
            )


def experiment(name: Name, options: Options, *, carry: int) -> Experiment:
    """Returns a variant's run."""
    norm = FINAL_NORM if name == "lrt" else NormConfig()
    return Experiment(
        name=name if carry == 1 else f"{name}_carry{carry}",
        model=ModelConfig(vocabulary=256, stack=stack(name), final_norm=norm),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False)),
        objective=Chunked(chunk=16) if name == "lrt" else NextToken(),
        optimizer=AdamW(learning_rate=options.rate, b2=0.99),
        schedule=Cosine(warmup_steps=max(1, options.steps // 20)),
        training=TrainingConfig(
            steps=options.steps,
            batch=BATCH,
            length=LENGTH,
            carry=carry,
            checkpoint_every=max(1, options.steps // 4),
            keep_checkpoints=1,
        ),
        evaluation=EvaluationConfig(batches=1),
    )


def bits_by_position(run: Experiment, root: Path) -> dict[str, float]:
    """Returns bits per byte at the positions before T, 2 T, 4 T and 8 T."""
    dataset, length = open_dataset(run.data), CARRY * LENGTH
    loader = dataset.loader("validation", length=length, batch=BATCH, in_order=True)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    rows = placed(iter(loader), mesh, batch=BATCH)
    parts = loss_by_position(load_run(root).model, rows, stretch=LENGTH)
    edges = (0, *(LENGTH * times for times in (1, 2, 4, 8)))
    figures = {}
    for start, stop in zip(edges, edges[1:], strict=False):
        inside = [part for part in parts if start <= part.start < stop]
        nats = sum(part.loss * part.tokens for part in inside)
        tokens = sum(part.tokens for part in inside)
        figures[f"{start} to {stop - 1}"] = nats / tokens / math.log(2)
    return figures


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet, reads on, and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="stateful_training.py")
    console, results = Console(), {}
    for seed in range(options.seeds):
        for name in options.variants:
            for carry in (1, CARRY):
                run = experiment(name, options, carry=carry)
                row, run = run.name, seeded(run, seed)
                console.rule(run.name)
                root = options.runs / run.name
                # A finished run is only checked to have these settings.
                if train(run, root, console=console).outcome != "finished":
                    console.print("stopped: the same command goes on from here")
                    return 130
                file = root / "by_position.json"
                if not file.exists():
                    figures = bits_by_position(run, root)
                    write_atomic(file, json_text(figures, indent=2) + "\n")
                figures = read_json_object(file, "a run's losses by position")
                tell(results, row, seed, figures)
                table = table_of("bits per byte at positions", results)
                write_atomic(options.runs / "results.md", table)
    print(table_of("bits per byte at positions", results), end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
