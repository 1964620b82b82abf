"""The paper's runs on SlimPajama as a table: uptraining, distillation, exits.

Three pretrained models are imported and made recursive, SlimPajama is prepared with
each one's tokenizer, then they train:

    recurjax convert from-hf google/gemma-2b runs/gemma
    recurjax data prepare --out data/slimpajama_gemma \
        --corpus 'slimpajama/*.jsonl' --format jsonl --tokenizer gemma/tokenizer.json
    recurjax convert to-recursive runs/gemma runs/gemma_b2_stepwise_start --loops 2 \
        --rank 0
    recurjax convert to-recursive runs/gemma runs/gemma_b2_rank64_start --loops 2 \
        --init average --rank 64
    recurjax train \
        experiments/relaxed_recursive_transformer/runs.py:gemma_b2_stepwise_15b

A run starts from runs/NAME_start, NAME without its tokens. The teacher of the 60B runs
is the full-size model uptrained on 15B tokens (of TinyLlama the pretrained one); a
distilled model starts where the others do. Exits are trained for 15B more tokens.

Source: appendix E and tables F.1 and J.1. AdamW, 2e-4, cosine, warm-up 200 steps of 15B
tokens and 800 of 60B, 2,048 tokens a row, 2M tokens a step, bfloat16. What it leaves
open: the gradient is clipped at 1, weights decay by 0.1, the cosine ends at 0.
"""

from dataclasses import replace
from functools import partial

from recurjax.data.config import DataConfig, Prepared, TokenizerFile
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.losses.divergence import FrozenModel
from recurjax.model import ModelConfig
from recurjax.run_table import Run
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.objective import Distilled, Exits, NextToken, Objective
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.training.spikes import SpikeConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

LENGTH, TOKENS_A_STEP = 2048, 2**21
RANKS = (64, 128, 256, 512)
CHUNKS = 8
"""Of the vocabulary: 256,000 tokens' logits of two models at once."""


def _gemma() -> ModelConfig:
    """Gemma 2B: 18 layers, one key head, tied head."""
    norm = NormConfig(eps=1e-6, one_plus=True)
    stack = TransformerConfig(
        layers=18,
        width=2048,
        attention=AttentionConfig(heads=8, key_heads=1, head_width=256),
        mlp=MlpConfig(kind="geglu_tanh", width=16384),
        norm=norm,
        remat="block",
    )
    return ModelConfig(
        vocabulary=256000,
        stack=stack,
        final_norm=norm,
        tied_head=True,
        embedding_scale="sqrt_width",
        dtype="bfloat16",
    )


def _tinyllama() -> ModelConfig:
    """TinyLlama 1.1B, the checkpoint of 105B tokens: 22 layers."""
    norm = NormConfig(eps=1e-5)
    stack = TransformerConfig(
        layers=22,
        width=2048,
        attention=AttentionConfig(heads=32, key_heads=4, head_width=64),
        mlp=MlpConfig(kind="swiglu", width=5632),
        norm=norm,
        remat="block",
    )
    return ModelConfig(vocabulary=32000, stack=stack, final_norm=norm, dtype="bfloat16")


def _pythia() -> ModelConfig:
    """Pythia 1B: 16 layers in GPT-NeoX's form."""
    norm = NormConfig(kind="layer", bias=True, eps=1e-5)
    stack = TransformerConfig(
        layers=16,
        width=2048,
        attention=AttentionConfig(
            heads=8,
            key_heads=8,
            head_width=256,
            position=Rope(fraction=0.25),
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpConfig(kind="gelu", width=8192, bias=True),
        norm=norm,
        parallel_residual=True,
        remat="block",
    )
    return ModelConfig(vocabulary=50304, stack=stack, final_norm=norm, dtype="bfloat16")


BASES = {"gemma": _gemma(), "tinyllama": _tinyllama(), "pythia": _pythia()}


def recursive(base: str, *, loops: int, rank: int = 0) -> ModelConfig:
    """Returns a pretrained model's recursive form; norms are shared, as the paper's."""
    model = BASES[base]
    assert isinstance(model.stack, TransformerConfig)
    stack = RelaxedRecursiveTransformerConfig(
        transformer=model.stack, loops=loops, rank=rank
    )
    return replace(model, stack=stack)


def reduced(base: str, *, loops: int) -> ModelConfig:
    """Returns the baseline: an ordinary model of the block's layers."""
    model = BASES[base]
    assert isinstance(model.stack, TransformerConfig)
    layers = model.stack.layers // loops
    return replace(model, stack=replace(model.stack, layers=layers))


def teacher(base: str) -> FrozenModel:
    """Returns who the 60B runs are distilled from."""
    run = "tinyllama" if base == "tinyllama" else f"rrt_{base}_full_15b"
    return FrozenModel(run=f"runs/{run}", model=BASES[base])


def _uptraining(
    name: str,
    *,
    base: str,
    model: ModelConfig,
    start: str | None,
    billions: int,
    objective: Objective,
) -> Experiment:
    return Experiment(
        name=f"rrt_{name}",
        model=model,
        data=DataConfig(
            corpus=Prepared(directory=f"data/slimpajama_{base}"),
            tokenizer=TokenizerFile(path=f"data/slimpajama_{base}/tokenizer"),
        ),
        objective=objective,
        optimizer=AdamW(learning_rate=2e-4),
        schedule=Cosine(warmup_steps=800 if billions == 60 else 200, end=0.0),
        training=TrainingConfig(
            steps=round(billions * 1e9 / TOKENS_A_STEP),
            batch=TOKENS_A_STEP // LENGTH,
            length=LENGTH,
            start_from=start,
            checkpoint_every=500,
            spikes=SpikeConfig(enabled=False),
        ),
        evaluation=EvaluationConfig(every=500, batches=64),
    )


def _run(
    base: str,
    model: ModelConfig,
    start: str | None,
    reproduces: str,
    expected: str,
    *,
    billions: int = 15,
    objective: Objective | None = None,
) -> Run:
    make = partial(
        _uptraining,
        base=base,
        model=model,
        start=None if start is None else f"runs/{start}",
        billions=billions,
        objective=NextToken(vocabulary_chunks=CHUNKS)
        if objective is None
        else objective,
    )
    return Run(make=make, reproduces=reproduces, expected=expected)


def _distilled(base: str) -> Distilled:
    return Distilled(teacher=teacher(base), vocabulary_chunks=CHUNKS)


F1 = "Table F.1"
PERPLEXITY = {
    ("gemma", 2, "stepwise"): 12.85,
    ("gemma", 2, "average"): 15.15,
    ("gemma", 2, "lower"): 15.03,
    ("gemma", 2, "random"): 22.66,
    ("gemma", 3, "stepwise"): 14.75,
    ("gemma", 3, "average"): 17.45,
    ("gemma", 3, "lower"): 15.96,
    ("tinyllama", 2, "stepwise"): 11.61,
    ("tinyllama", 2, "average"): 11.86,
    ("tinyllama", 2, "lower"): 14.67,
    ("pythia", 2, "stepwise"): 16.38,
    ("pythia", 2, "average"): 16.76,
    ("pythia", 2, "lower"): 17.04,
    ("pythia", 2, "random"): 24.45,
}
"""SlimPajama's, after 15B tokens, by base, loops and init."""
FULL = {"gemma": 10.76, "pythia": 13.46}
REDUCED = {
    ("gemma", 2): 22.63,
    ("gemma", 3): 24.44,
    ("tinyllama", 2): 16.61,
    ("pythia", 2): 25.69,
}
EXITS = {
    "weighted": (Exits(weights="weighted", self_distillation=0.0), "50.5, loop 1 49.8"),
    "aggressive": (Exits(self_distillation=0.0), "52.5, loop 1 47.1"),
    "weighted_self": (Exits(weights="weighted"), "50.4, loop 1 49.9"),
    "aggressive_self": (Exits(), "52.6, loop 1 48.0"),
}
"""Of Gemma, loops 2: the objective, and the few-shot averages of its two exits."""


def _table() -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for base, figure in FULL.items():
        says = f"SlimPajama perplexity {figure}"
        model = BASES[base]
        runs[f"{base}_full_15b"] = _run(base, model, base, f"{F1}, full size", says)
        runs[f"{base}_full_60b"] = _run(
            base, model, base, "Figure 4, full size", "the reference", billions=60
        )
    for (base, loops, init), figure in PERPLEXITY.items():
        stem = f"{base}_b{loops}_{init}"
        # A random block is drawn by the converter: embeddings and head are kept.
        runs[f"{stem}_15b"] = _run(
            base,
            recursive(base, loops=loops),
            f"{stem}_start",
            f"{F1}, {loops} loops, {init}",
            f"SlimPajama perplexity {figure}",
        )
    for (base, loops), figure in REDUCED.items():
        model = reduced(base, loops=loops)
        runs[f"{base}_reduced_b{loops}_15b"] = _run(
            base,
            model,
            None,
            f"{F1}, {BASES[base].stack.layers // loops} layers from scratch",
            f"SlimPajama perplexity {figure}",
        )
        runs[f"{base}_reduced_b{loops}_60b"] = _run(
            base,
            model,
            None,
            "Figure 4, reduced size, distilled",
            "below the recursive model of its size",
            billions=60,
            objective=_distilled(base),
        )
    for base, loops in REDUCED:
        runs[f"{base}_b{loops}_stepwise_60b"] = _run(
            base,
            recursive(base, loops=loops),
            f"{base}_b{loops}_stepwise_start",
            "Figure 4, recursive, distilled",
            "near the full size with half its layers or a third",
            billions=60,
            objective=_distilled(base),
        )
        for rank in RANKS:
            runs[f"{base}_b{loops}_rank{rank}_60b"] = _run(
                base,
                recursive(base, loops=loops, rank=rank),
                f"{base}_b{loops}_rank{rank}_start",
                f"Figure 4, relaxed, rank {rank}, Average and SVD, distilled",
                "better with rank; 512 near the full size",
                billions=60,
                objective=_distilled(base),
            )
    for kind, (objective, says) in EXITS.items():
        runs[f"gemma_b2_exits_{kind}_15b"] = _run(
            "gemma",
            recursive("gemma", loops=2),
            "rrt_gemma_b2_stepwise_15b",
            f"Table 3, exits, {kind.replace('_', ' and ')}",
            f"few-shot average {says}",
            objective=replace(objective, vocabulary_chunks=CHUNKS),
        )
    return runs


RUNS = _table()
