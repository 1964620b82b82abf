"""Latent Recurrent Transformer: Architecture Exploration, Training Strategies, ...

The paper's runs, and a miniature of them.

The runs of nanochat read FineWeb-Edu, prepared once with nanochat's BPE of 32,768
tokens:

    recurjax data prepare --out data/fineweb_edu_nanochat \
        --corpus 'fineweb_edu/*.parquet' --format parquet --tokenizer nanochat-bpe:32768
    recurjax train experiments/latent_recurrent_transformer/runs.py:shared_20

They train at R = 10 tokens per parameter, all counted; a row that ends in _r40
at R = 40. Source: appendix A; the
rest is the nanochat of January 2026. No step is skipped as a spike.

shakespeare: the paper's comparison on the embedded text, for two CPU cores, at equal
tokens and at equal compute; nothing was tuned. latent_shakespeare.py runs it.
"""

import dataclasses
from functools import partial
from typing import Any

from recurjax.data.config import (
    Bytes,
    DataConfig,
    EmbeddedText,
    Prepared,
    TokenizerFile,
)
from recurjax.experiment import Experiment
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig, count_parameters
from recurjax.run_table import Run
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import Chunked, Interleaved, NextToken, Objective
from recurjax.training.optimizers import LinearWarmdown, MuonAdamW
from recurjax.training.spikes import SpikeConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from recurjax.variants.latent_recurrent_transformer.presets import (
    FINAL_NORM,
    PADDED_VOCABULARY,
    layerwise,
    nanochat,
    shared,
)

LENGTH = 2048
BATCH_TOKENS = 2**19


def _run(
    reproduces: str,
    bits_per_byte: float,
    stack: LatentRecurrentTransformerConfig,
    *,
    objective: Objective | None = None,
    ratio: float = 10,
) -> Run:
    """Returns a run of nanochat.

    Args:
      reproduces: the paper's table.
      bits_per_byte: its figure there, BPB.
      stack: the backbone, with a memory or without.
      objective: None: interleaved with two subsets, or next-token without a memory.
      ratio: R, tokens per parameter.
    """
    default = NextToken() if stack.memory is None else Interleaved(subsets=2)
    make = partial(_nanochat, stack=stack, objective=objective or default, ratio=ratio)
    return Run(make=make, reproduces=reproduces, expected=f"{bits_per_byte:.3f} BPB")


def _nanochat(
    name: str,
    *,
    stack: LatentRecurrentTransformerConfig,
    objective: Objective,
    ratio: float,
) -> Experiment:
    model = ModelConfig(
        vocabulary=PADDED_VOCABULARY,
        stack=dataclasses.replace(stack, remat="block"),
        final_norm=FINAL_NORM,
        logit_soft_cap=15.0,
        dtype="bfloat16",
    )
    return Experiment(
        name=f"lrt_{name}",
        model=model,
        data=DataConfig(
            corpus=Prepared(directory="data/fineweb_edu_nanochat"),
            tokenizer=TokenizerFile(path="data/fineweb_edu_nanochat/tokenizer"),
            packing="best_fit",
        ),
        optimizer=MuonAdamW(dtype="bfloat16"),
        schedule=LinearWarmdown(warmdown=0.5, end=0.0),
        objective=objective,
        training=TrainingConfig(
            steps=round(ratio * count_parameters(model).total / BATCH_TOKENS),
            batch=BATCH_TOKENS // LENGTH,
            length=LENGTH,
            gradient_clip=None,
            spikes=SpikeConfig(enabled=False),
        ),
        evaluation=EvaluationConfig(every=1000, batches=20),
    )


def _shared(**switches: Any) -> LatentRecurrentTransformerConfig:
    """Returns the 20 layers with a shared memory, changed as an ablation does."""
    return nanochat(20, memory=shared(20, **switches))


def _source(*layers: int) -> LatentRecurrentTransformerConfig:
    """Returns the same with the memory taken from other layers."""
    return nanochat(20, memory=MemoryConfig(sources=layers))


def _baseline(**switches: Any) -> LatentRecurrentTransformerConfig:
    """Returns the vanilla backbone of 20 layers with what a baseline adds."""
    vanilla: dict[str, Any] = {
        "value_embeddings": "none",
        "residual_scales": False,
        "input_mixing": "none",
    }
    return nanochat(20, **vanilla | switches)


SMALL_LAYERS, SMALL_WIDTH, SMALL_LENGTH, SMALL_BATCH, SMALL_STEPS = 4, 64, 128, 16, 400


def _small(
    memory: MemoryConfig | None,
    objective: Objective,
    reproduces: str = "no table: equal tokens in miniature",
    *,
    times: int = 1,
) -> Run:
    """Returns a small run: 2,048 bytes per step, `times` the others' steps."""
    readme = "recurjax/variants/latent_recurrent_transformer/README.md"
    expected = f"bits per byte in {readme}"
    make = partial(_tiny, memory=memory, objective=objective, times=times)
    return Run(make=make, reproduces=reproduces, expected=expected)


def _ablated(table: str, memory: MemoryConfig, *, subsets: int = 2) -> Run:
    """Returns a small run that differs from shakespeare_shared in one thing."""
    objective = Interleaved(subsets=subsets)
    return _small(memory, objective, f"no table: {table} in miniature")


def _tiny(
    name: str, *, memory: MemoryConfig | None, objective: Objective, times: int
) -> Experiment:
    return Experiment(
        name=name.removeprefix("shakespeare_"),
        model=ModelConfig(
            vocabulary=256,
            stack=nanochat(
                SMALL_LAYERS,
                width=SMALL_WIDTH,
                head_width=SMALL_WIDTH // 2,
                vocabulary=256,
                length=SMALL_LENGTH,
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
            steps=times * SMALL_STEPS,
            batch=SMALL_BATCH,
            length=SMALL_LENGTH,
            gradient_clip=None,
            checkpoint_every=100,
        ),
        evaluation=EvaluationConfig(batch=32),
    )


_RATIOS = (5, 10, 20, 40, 60, 80, 120)
_TABLE_4 = {
    "base_20": (nanochat(20), "0.789 0.767 0.751 0.739 0.734 0.731 0.726"),
    "shared_20": (_shared(), "0.777 0.754 0.739 0.727 0.721 0.717"),
    "layerwise_20": (
        nanochat(20, memory=layerwise(20)),
        "0.775 0.752 0.735 0.725 0.719 0.715",
    ),
    "base_24": (nanochat(24), "0.753 0.733 0.719 0.709 0.703 0.699 0.694"),
    "shared_24": (
        nanochat(24, memory=shared(24)),
        "0.742 0.722 0.706 0.695 0.689 0.685",
    ),
    "layerwise_24": (
        nanochat(24, memory=layerwise(24)),
        "0.739 0.720 0.704 0.693 0.687 0.683",
    ),
}
"""The paper's Table 4, BPB over `_RATIOS`; only the baselines were trained at 120."""


def _scaling() -> dict[str, Run]:
    """Returns a row per model and R; names leave out R = 10, that of all ablations."""
    rows = {}
    for model, (stack, figures) in _TABLE_4.items():
        for ratio, figure in zip(_RATIOS, figures.split(), strict=False):
            name = model if ratio == 10 else f"{model}_r{ratio}"
            where = f"Tables 4 and 5, Fig. 3, R = {ratio}"
            rows[name] = _run(where, float(figure), stack, ratio=ratio)
    return rows


RUNS: dict[str, Run] = {
    # base_20 (R = 10), base_20_r5, base_20_r20 ..., shared_20 ...: Table 4 and Fig. 3.
    **_scaling(),
    # Which layer the memory is taken from; compare with base_20 and shared_20 (layer
    # 12).
    "source_8": _run("Table 1", 0.757, _source(8)),
    "source_16": _run("Table 1", 0.756, _source(16)),
    "source_20": _run("Table 1", 0.755, _source(20)),
    "source_average": _run("Table 1", 0.754, _source(8, 12, 16, 20)),
    # Which token it is taken from; shared_20 is one back.
    "lag_4": _run("Table 2", 0.760, _shared(lags=(4,))),
    "lag_3": _run("Table 2", 0.760, _shared(lags=(3,))),
    "lag_2": _run("Table 2", 0.757, _shared(lags=(2,))),
    "lag_average": _run("Table 2", 0.754, _shared(lags=(1, 2, 3, 4))),
    "own_state": _run("Table 2: two forwards a token", 0.754, _shared(lags=(0,))),
    "own_and_last_state": _run(
        "Table 2: two forwards a token", 0.752, _shared(lags=(0, 1), combine="sum")
    ),
    # Where it enters.
    "residual_only": _run("Table 3", 0.756, _shared(keys=False, values=False)),
    "projection_only": _run("Table 3", 0.755, _shared(residual=False)),
    "values_only": _run("Table 6", 0.756, _shared(keys=False, residual=False)),
    "keys_only": _run("Table 6", 0.762, _shared(values=False, residual=False)),
    "replacing_third": _run(
        "Table 6: in place of the local keys and values, first third of layers",
        0.760,
        _shared(residual=False, entry_layers=7, replace_layers=7),
    ),
    # How it is trained; shared_20 has S = 2.
    "chunked_64_r20": _run(
        "Table 7", 0.750, _shared(), objective=Chunked(chunk=64), ratio=20
    ),
    "chunked_256_r20": _run(
        "Table 7", 0.751, _shared(), objective=Chunked(chunk=256), ratio=20
    ),
    "chunked_64": _run("Table 7", 0.765, _shared(), objective=Chunked(chunk=64)),
    "chunked_256": _run("Table 7", 0.767, _shared(), objective=Chunked(chunk=256)),
    "subsets_4": _run("Table 9", 0.754, _shared(), objective=Interleaved(subsets=4)),
    "subsets_8": _run("Table 9", 0.754, _shared(), objective=Interleaved(subsets=8)),
    # Baselines without a memory; base_20 has value embeddings and input mixing.
    "baseline_vanilla": _run("Table 8", 0.784, _baseline()),
    "baseline_layer_scaled": _run(
        "Table 8", 0.782, _baseline(attention_scale=True, mlp_scale=True)
    ),
    "baseline_gated_attention": _run("Table 8", 0.782, _baseline(attention_scale=True)),
    "baseline_input_mixing": _run(
        "Table 8", 0.779, nanochat(20, value_embeddings="none")
    ),
    "baseline_dense_mixing": _run(
        "Table 8", 0.783, nanochat(20, value_embeddings="none", input_mixing="dense")
    ),
    "baseline_value_residual": _run(
        "Table 8", 0.779, _baseline(value_residual="first")
    ),
    "baseline_projected_value_residual": _run(
        "Table 8", 0.780, _baseline(value_residual="projected")
    ),
    "baseline_value_embedding": _run(
        "Table 8", 0.770, nanochat(20, residual_scales=False, input_mixing="none")
    ),
    "baseline_value_embedding_gated": _run(
        "Table 8: with input mixing and gated attention",
        0.767,
        nanochat(20, attention_scale=True),
    ),
    # Four layers of width 64 on the embedded text.
    "shakespeare_base": _small(None, NextToken()),
    "shakespeare_base_2x": _small(
        None, NextToken(), "no table: equal compute in miniature", times=2
    ),
    "shakespeare_shared": _small(shared(SMALL_LAYERS), Interleaved(subsets=2)),
    "shakespeare_layerwise": _small(layerwise(SMALL_LAYERS), Interleaved(subsets=2)),
    "shakespeare_chunked": _small(shared(SMALL_LAYERS), Chunked(chunk=32)),
    # The ablations of shakespeare_shared, whose source is layer 2.
    "shakespeare_source_1": _ablated("Table 1", MemoryConfig(sources=(1,))),
    "shakespeare_source_3": _ablated("Table 1", MemoryConfig(sources=(3,))),
    "shakespeare_source_4": _ablated("Table 1", MemoryConfig(sources=(4,))),
    "shakespeare_source_average": _ablated(
        "Table 1", MemoryConfig(sources=(1, 2, 3, 4))
    ),
    "shakespeare_lag_2": _ablated("Table 2", shared(SMALL_LAYERS, lags=(2,))),
    "shakespeare_lag_average": _ablated(
        "Table 2", shared(SMALL_LAYERS, lags=(1, 2, 3, 4))
    ),
    "shakespeare_residual_only": _ablated(
        "Table 3", shared(SMALL_LAYERS, keys=False, values=False)
    ),
    "shakespeare_projection_only": _ablated(
        "Table 3", shared(SMALL_LAYERS, residual=False)
    ),
    "shakespeare_subsets_4": _ablated("Table 9", shared(SMALL_LAYERS), subsets=4),
}
