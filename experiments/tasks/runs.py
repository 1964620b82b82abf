"""Small tasks by eighteen small models of one size, for two CPU cores.

Two layers of width 64 with four heads; the MLP's width makes all models as large as
attention with 256, within half a percent. RT has eight heads and two thirds of the
rate, since with four it stays at MQAR's floor. Positions are each paper's own: ALiBi
for RT, rotation of tokens for LRT, attention, its window and RecurFormer's heads, of
chunks for RAT; the RNN and Mamba have none. `ratN` has chunks of N tokens;
`recurformer_N` replaces N percent of the heads by Mamba; `mamba_swa` and the like name
the mixers of both layers; `rat16_memory` is RAT with LRT's memory. All see the same
rows with Adam; LRT and RAT with its memory make two passes over them.

Settings that can learn recall: embeddings as large as what a branch writes
(`UNIT_VARIANCE`), an untied head, 64 rows per step (16 of MAD), 50 steps of warm-up
and a constant rate, so that a longer run begins like a shorter one.

    python experiments/tasks/recall.py

trains them with three seeds and writes table and curves.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from recurjax.data.tasks import (
    Compression,
    Copy,
    HashHop,
    Mqar,
    Needles,
    Setting,
    StateTracking,
    TaskConfig,
    TaskData,
)
from recurjax.data.tasks.mad import BASELINES
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import UNIT_VARIANCE
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig, StackConfig
from recurjax.run_table import Run
from recurjax.surgery.recency import first_heads
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import Compress, Interleaved, NextToken
from recurjax.training.optimizers import Adam, Constant
from recurjax.training.spikes import SpikeConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.presets import FINAL_NORM, shared
from recurjax.variants.rat import PlaceConfig, RatConfig, presets
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.transformer import TransformerConfig

LAYERS, WIDTH, HEADS = 2, 64, 4
BATCH, WARMUP = 64, 50
TESTED = 256
"""Rows of each task's test."""

Mixer = Literal[
    "attention",
    "swa",
    "rt",
    "lrt",
    "rat2",
    "rat4",
    "rat16",
    "rnn",
    "recurformer_25",
    "recurformer_50",
    "recurformer_75",
    "recurformer_100",
    "mamba",
    "mamba_attention",
    "mamba_swa",
    "mamba_rat16",
    "swa_rt",
    "rat16_memory",
]
MLP_WIDTHS: dict[Mixer, int] = {
    "attention": 256,
    "swa": 256,
    "rt": 126,
    "lrt": 220,
    "rat2": 223,
    "rat4": 223,
    "rat16": 223,
    "rnn": 255,
    "recurformer_25": 242,
    "recurformer_50": 204,
    "recurformer_75": 143,
    "recurformer_100": 57,
    "mamba": 129,
    "mamba_attention": 192,
    "mamba_swa": 192,
    "mamba_rat16": 176,
    "swa_rt": 191,
    "rat16_memory": 223,
}
"""What is left for the MLP next to each mixer."""
RATES: dict[Mixer, float] = {"rt": 2e-3, "swa_rt": 2e-3}
"""Learning rates other than 3e-3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallTask:
    """A task, how many tokens a run on it may read, and the rows of a step."""

    task: TaskConfig
    tokens: int
    rows: int = BATCH


TASKS: dict[str, SmallTask] = {
    "mqar": SmallTask(
        task=Mqar(
            vocabulary=128,
            train=(Setting(32, 4, 100_000),),
            validation=(Setting(32, 4, TESTED),),
        ),
        tokens=4_000_000,
    ),
    "mqar_mixed": SmallTask(
        task=Mqar(
            vocabulary=128,
            train=tuple(Setting(64, pairs, 50_000) for pairs in (4, 8, 16)),
            validation=tuple(Setting(64, pairs, 128) for pairs in (4, 8, 16)),
        ),
        tokens=4_000_000,
    ),
    "needles": SmallTask(
        task=Needles(needles=4, length=32, validation_rows=TESTED), tokens=2_000_000
    ),
    "needles_64": SmallTask(
        task=Needles(needles=8, length=64, validation_rows=TESTED), tokens=4_000_000
    ),
    "copy": SmallTask(
        task=Copy(length=64, shortest=5, longest_string=15, validation_rows=TESTED),
        tokens=2_000_000,
    ),
    "s3": SmallTask(
        task=StateTracking(
            group="S3", length=64, validation_length=64, validation_rows=TESTED
        ),
        tokens=4_000_000,
    ),
    "hash_hop": SmallTask(
        task=HashHop(size=2, hops=2, length=64, validation_rows=TESTED),
        tokens=8_000_000,
    ),
    **{
        # Most of them have rows four to eight times as long as mqar's.
        f"mad_{name}": SmallTask(
            task=replace(task, validation_rows=TESTED), tokens=4_000_000, rows=16
        )
        for name, task in BASELINES.items()
    },
}


def stack(mixer: Mixer, *, vocabulary: int, length: int) -> StackConfig:
    """Returns a model's two layers.

    Args:
      mixer: which.
      vocabulary: vocabulary of the task.
      length: T of training; a window of `swa` is a quarter of it, as in RAT's paper.
    """
    mlp = MlpConfig(kind="gelu", width=MLP_WIDTHS[mixer])
    if mixer == "rt":
        return RecurrentTransformerConfig(
            layers=LAYERS,
            width=WIDTH,
            heads=2 * HEADS,
            key_heads=2 * HEADS,
            head_width=WIDTH // HEADS,
            mlp=mlp,
            init=UNIT_VARIANCE,
        )
    if mixer == "lrt":
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
            # What nanochat adds to a Transformer next to the memory is left out, so
            # that the memory is what is compared.
            value_embeddings="none",
            residual_scales=False,
            input_mixing="none",
            memory=shared(LAYERS),
            init=UNIT_VARIANCE,
        )
    if mixer.startswith("recurformer"):
        transformer = TransformerConfig(
            layers=LAYERS,
            width=WIDTH,
            attention=AttentionConfig(
                heads=HEADS, key_heads=HEADS, head_width=WIDTH // HEADS
            ),
            mlp=mlp,
            init=UNIT_VARIANCE,
        )
        share = int(mixer.removeprefix("recurformer_")) / 100
        return RecurFormerConfig(
            transformer=transformer,
            replaced=first_heads(LAYERS, HEADS, share),
            # The paper's rank of 256 exceeds the channels of so few and narrow heads.
            mamba=MambaConfig(dt_rank=8),
        )
    size = {"width": WIDTH, "heads": HEADS}
    places: dict[str, PlaceConfig] = {
        **{f"rat{chunk}": presets.rat(**size, chunk=chunk) for chunk in (2, 4, 16)},
        "rnn": presets.rnn(**size, length=length),
        "attention": presets.attention(**size),
        "swa": presets.attention(**size, window=length // 4),
        "mamba": presets.mamba(width=WIDTH),
        "rt": presets.recurrent(width=2 * WIDTH, heads=2 * HEADS),
    }
    pattern = mixer.removesuffix("_memory")
    mixers = RatConfig(
        layers=LAYERS,
        width=WIDTH,
        pattern=tuple(places[word] for word in pattern.split("_")),
        mlp=mlp,
        init=UNIT_VARIANCE,
    )
    return mixers if mixer == pattern else presets.with_memory(mixers)


def _small(name: str, *, mixer: Mixer, task: SmallTask) -> Experiment:
    length = task.task.longest("train")
    compresses = isinstance(task.task, Compression)
    subsets = {"lrt": 2, "rat16_memory": 1}.get(mixer)
    objective = NextToken() if subsets is None else Interleaved(subsets=subsets)
    return Experiment(
        name=f"tasks_{name}",
        model=ModelConfig(
            vocabulary=task.task.vocabulary,
            stack=stack(mixer, vocabulary=task.task.vocabulary, length=length),
            final_norm=FINAL_NORM if mixer == "lrt" else NormConfig(),
            row_decoder=compresses,
        ),
        data=TaskData(task=task.task),
        objective=Compress() if compresses else objective,
        optimizer=Adam(learning_rate=RATES.get(mixer, 3e-3), b2=0.98),
        schedule=Constant(warmup_steps=WARMUP),
        training=TrainingConfig(
            steps=-(-task.tokens // (task.rows * length)),
            batch=task.rows,
            length=length,
            log_every=50,
            keep_checkpoints=1,
            # A task's loss falls all at once, and a batch may rise far above it.
            spikes=SpikeConfig(enabled=False),
        ),
        evaluation=EvaluationConfig(every=50, batch=64),
    )


RUNS: dict[str, Run] = {
    f"{task}_{mixer}": Run(
        make=partial(_small, mixer=mixer, task=sizes),
        reproduces="no table: eighteen models of one size",
        expected="tokens to 0.9 in docs/tasks.md",
    )
    for task, sizes in TASKS.items()
    for mixer in MLP_WIDTHS
}
