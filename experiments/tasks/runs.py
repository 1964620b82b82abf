"""Six small tasks by six small models of one size, for two CPU cores.

Two layers of width 64 with four heads; the MLP's width makes all models as large as
attention with 256, within half a percent. Positions are each paper's own: ALiBi for RT,
rotation of tokens for LRT, attention and its window, of chunks for RAT; the RNN has
none. All see the same rows, once, with Adam; LRT makes its two passes over them.

    python experiments/tasks/small.py

trains them with three seeds at a rate of their own and writes the table.
"""

from functools import partial
from typing import Literal

from recurjax.data.tasks import (
    Copy,
    InContextRecall,
    Mqar,
    Needles,
    SelectiveCopying,
    Setting,
    StateTracking,
    TaskConfig,
    TaskData,
)
from recurjax.experiment import Experiment
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig, StackConfig
from recurjax.run_table import Run
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import Interleaved, NextToken
from recurjax.training.optimizers import Adam, Cosine
from recurjax.training.spikes import SpikeConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.presets import FINAL_NORM, shared
from recurjax.variants.rat import MixerConfig, RatConfig, presets
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig

LAYERS, WIDTH, HEADS = 2, 64, 4
LENGTH, BATCH, STEPS = 64, 32, 500
LONG, LONG_BATCH = 512, 8
TESTED = 256
"""Rows of each task's test."""
INIT = InitConfig(std=None, embedding_std=None)
"""Every weight 1/sqrt(fan in): GPT-2's 0.02 is for larger widths."""

Model = Literal["rt", "lrt", "rat16", "rnn", "attention", "swa"]
MLP_WIDTHS: dict[Model, int] = {
    "rt": 255,
    "lrt": 220,
    "rat16": 223,
    "rnn": 255,
    "attention": 256,
    "swa": 256,
}
"""What is left for the MLP beside each mixer."""

TASKS: dict[str, TaskConfig] = {
    "copy": Copy(length=LENGTH, shortest=5, longest_string=15, validation_rows=TESTED),
    # Tested as long as it was learned; small.py reads on to four times that.
    "s3": StateTracking(
        group="S3", length=LENGTH, validation_length=LENGTH, validation_rows=TESTED
    ),
    "selective_copying": SelectiveCopying(
        length=LENGTH, tokens_to_copy=8, train_rows=None, validation_rows=TESTED
    ),
    "recall": InContextRecall(length=LENGTH, train_rows=None, validation_rows=TESTED),
    "mqar": Mqar(
        vocabulary=128,
        train=(Setting(LENGTH, 4, 100_000),),
        validation=(Setting(LENGTH, 4, TESTED),),
    ),
    "needles": Needles(length=LONG, validation_rows=TESTED),
}


def stack(model: Model, *, vocabulary: int, length: int) -> StackConfig:
    """Returns a model's two layers.

    Args:
      model: which.
      vocabulary: of the task.
      length: T of training; a window of `swa` is a quarter of it, as in RAT's paper.
    """
    if model == "rt":
        return RecurrentTransformerConfig(
            layers=LAYERS,
            width=WIDTH,
            heads=HEADS,
            key_heads=HEADS,
            head_width=WIDTH // HEADS,
            mlp=MlpConfig(kind="gelu", width=MLP_WIDTHS["rt"]),
            init=INIT,
        )
    if model == "lrt":
        return LatentRecurrentTransformerConfig(
            layers=LAYERS,
            width=WIDTH,
            heads=HEADS,
            key_heads=HEADS,
            head_width=WIDTH // HEADS,
            mlp_width=MLP_WIDTHS["lrt"],
            vocabulary=vocabulary,
            length=length,
            windows="L",
            # What nanochat adds to a Transformer beside the memory is left out, so that
            # the memory is what is compared.
            value_embeddings="none",
            residual_scales=False,
            input_mixing="none",
            memory=shared(LAYERS),
            init=INIT,
        )
    size = {"width": WIDTH, "heads": HEADS}
    mixers: dict[str, MixerConfig] = {
        "rat16": presets.rat(**size, chunk=16),
        "rnn": presets.rnn(**size, length=length),
        "attention": presets.attention(**size),
        "swa": presets.attention(**size, window=length // 4),
    }
    return RatConfig(
        layers=LAYERS,
        width=WIDTH,
        pattern=(mixers[model],),
        mlp=MlpConfig(kind="gelu", width=MLP_WIDTHS[model]),
        init=INIT,
    )


def _run(model: Model, task: str) -> Run:
    """Returns a row; small.py takes the best of several rates, see there."""
    return Run(
        make=partial(_small, model=model, task=TASKS[task]),
        reproduces="no table: six models of one size",
        expected="accuracy in docs/tasks.md",
    )


def _small(name: str, *, model: Model, task: TaskConfig) -> Experiment:
    length = task.longest("train")
    return Experiment(
        name=f"tasks_{name}",
        model=ModelConfig(
            vocabulary=task.vocabulary,
            stack=stack(model, vocabulary=task.vocabulary, length=length),
            final_norm=FINAL_NORM if model == "lrt" else NormConfig(),
        ),
        data=TaskData(task=task),
        objective=Interleaved(subsets=2) if model == "lrt" else NextToken(),
        optimizer=Adam(learning_rate=3e-3, b2=0.98),
        schedule=Cosine(warmup_steps=STEPS // 10),
        training=TrainingConfig(
            steps=STEPS,
            batch=BATCH if length == LENGTH else LONG_BATCH,
            length=length,
            log_every=50,
            checkpoint_every=STEPS,
            keep_checkpoints=1,
            # A task's loss falls all at once, and a batch may rise far above it.
            spikes=SpikeConfig(enabled=False),
        ),
        evaluation=EvaluationConfig(batch=64 if length == LENGTH else LONG_BATCH),
    )


RUNS: dict[str, Run] = {
    f"{task}_{model}": _run(model, task) for task in TASKS for model in MLP_WIDTHS
}
