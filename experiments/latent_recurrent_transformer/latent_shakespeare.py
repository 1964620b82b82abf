"""The memory at equal tokens and at equal compute, for two CPU cores.

The paper's comparison in miniature: the backbone, the backbone with twice the tokens
(what a pass of refinement costs), LRT-shared, LRT-layerwise, and chunked training, on
the embedded text. Nothing was tuned. Expect a table of validation bits per byte, each
position by its last pass; a stopped set goes on with the same command. The exact
recurrence's figure of a run comes from `recurjax evaluate RUN`.

    python experiments/latent_recurrent_transformer/latent_shakespeare.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from recurjax import host
from recurjax.cli.options import parse
from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.muon_adamw import MuonAdamW
from recurjax.training.objective import Chunked, Interleaved, NextToken, Objective
from recurjax.training.schedule import LinearWarmdown
from recurjax.training.sweep import sweep_and_print
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.latent_recurrent_transformer.presets import (
    layerwise,
    nanochat,
    shared,
)

LAYERS, WIDTH, LENGTH, BATCH = 4, 64, 128, 16
STEPS = 400

RUNS: dict[str, tuple[MemoryConfig | None, Objective, int]] = {
    "base": (None, NextToken(), 1),
    "base_2x": (None, NextToken(), 2),
    "shared": (shared(LAYERS), Interleaved(subsets=2), 1),
    "layerwise": (layerwise(LAYERS), Interleaved(subsets=2), 1),
    "chunked": (shared(LAYERS), Chunked(chunk=32), 1),
}
"""Memory, objective, and how many times the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the small set and prints its table.

    Attributes:
      runs: one run directory each, results.json and results.md.
      steps: of each run; base_2x takes twice as many.
    """

    runs: Path = Path("runs/lrt_shakespeare")
    steps: int = STEPS


def experiment(name: str, *, steps: int = STEPS) -> Experiment:
    """Returns a run of `RUNS`: 2,048 bytes a step."""
    memory, objective, times = RUNS[name]
    return Experiment(
        name=name,
        model=ModelConfig(
            vocabulary=256,
            stack=nanochat(
                LAYERS,
                width=WIDTH,
                head_width=WIDTH // 2,
                vocabulary=256,
                length=LENGTH,
                memory=memory,
            ),
            final_norm=NormConfig(scale=False),
            logit_soft_cap=15.0,
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False)),
        optimizer=MuonAdamW(),
        schedule=LinearWarmdown(warmdown=0.5, end=0.0),
        objective=objective,
        training=TrainingConfig(
            steps=times * steps,
            batch=BATCH,
            length=LENGTH,
            gradient_clip=None,
            checkpoint_every=100,
        ),
        evaluation=EvaluationConfig(batch=32),
    )


def config() -> Experiment:
    """Returns LRT-shared's run, for `recurjax train`."""
    return experiment("shared")


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="latent_shakespeare.py")
    runs = [experiment(name, steps=options.steps) for name in RUNS]
    return sweep_and_print(runs, options.runs)


if __name__ == "__main__":
    host.prepare()
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"latent_shakespeare.py: {error}")
