"""Relaxed Recursive Transformers: Effective Parameter Sharing with Layer-wise LoRA.

Uptraining, distillation and exits.

Three pretrained models are imported and made recursive, SlimPajama is prepared with
each one's tokenizer, then they train:

    recurjax convert from-hf google/gemma-2b runs/gemma
    recurjax data prepare --out data/slimpajama_gemma \
        --corpus 'slimpajama/*.jsonl' --format jsonl --tokenizer runs/gemma/tokenizer
    recurjax convert to-recursive runs/gemma runs/gemma_b2_stepwise_start --loops 2 \
        --rank 0
    recurjax convert to-recursive runs/gemma runs/gemma_b2_rank64_start --loops 2 \
        --init average --rank 64
    recurjax train \
        experiments/relaxed_recursive_transformer/runs.py:gemma_b2_stepwise_15b

A run starts from runs/NAME_start, NAME without its tokens and its objective, which a
conversion makes by the words in NAME: bI: --loops I; stepwise, average, lower or
fixed_start: --init; norm_choice or norm_zero: --norms; rankR alone: --init average
--rank R; svd or zero: --adapters; random_block: --init random. A random row starts from
no pretrained weight. Rows take vocabulary and sizes from runs/gemma, runs/tinyllama and
runs/pythia. While a directory is not there, the checkpoint's config replaces it, which
is enough to plan a row. The teacher of the 60B runs is the full-size model uptrained on
15B tokens (of TinyLlama the pretrained one); a distilled model starts where the others
do. Exits are trained for 15B more tokens.

Source: appendix E and tables F.1 and J.1. AdamW, 2e-4, cosine, warm-up 200 steps of 15B
tokens and 800 of 60B, 2,048 tokens per row, 2M tokens per step, bfloat16. What it
leaves
open: the gradient is clipped at 1, weights decay by 0.1, the cosine ends at 0.
"""

from dataclasses import replace
from functools import partial
from itertools import product

from recurjax.data.config import DataConfig, Prepared, TokenizerFile
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.losses.divergence import Divergence, FrozenModel
from recurjax.model import ModelConfig
from recurjax.run_table import Run, model_in
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
    return ModelConfig(
        # The tokenizer's tokens; the tables have more rows, which nothing reads.
        vocabulary=50277,
        pad_vocabulary_to=50304,
        stack=stack,
        final_norm=norm,
        dtype="bfloat16",
    )


def _imported(base: str, planned: ModelConfig) -> ModelConfig:
    """Returns the config of `runs/BASE`; the planned one while nothing is there."""
    model = model_in(f"runs/{base}")
    if model is None:
        return planned
    assert isinstance(model.stack, TransformerConfig)
    stack = replace(model.stack, remat="block")
    return replace(model, stack=stack, dtype="bfloat16")


BASES = {
    "gemma": _imported("gemma", _gemma()),
    "tinyllama": _imported("tinyllama", _tinyllama()),
    "pythia": _imported("pythia", _pythia()),
}


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


def _distilled(base: str, divergence: Divergence = "forward_kl") -> Distilled:
    return Distilled(
        teacher=teacher(base), divergence=divergence, vocabulary_chunks=CHUNKS
    )


F1 = "Table F.1"
LOOPS = (("gemma", 2), ("gemma", 3), ("tinyllama", 2), ("pythia", 2))
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
FULL = {
    ("gemma", 15): 10.76,
    ("gemma", 60): 10.58,
    ("tinyllama", 15): 9.87,
    ("tinyllama", 60): 9.59,
    ("pythia", 15): 13.46,
    ("pythia", 60): 12.83,
}
"""SlimPajama's, of the full size, by base and billions of tokens."""
REDUCED = dict(zip(LOOPS, (22.63, 24.44, 16.61, 25.69), strict=True))
VARIANTS = {
    "fixed_start": ("Figure F.1a", "above stepwise; of Pythia about as stepwise"),
    "average_norm_choice": ("Figure F.1b", "about as average"),
    "average_norm_zero": ("Figure F.1b", "above average; of TinyLlama, Pythia far"),
}
"""Of two loops: what reproduces each, and its training loss."""
DIVERGENCES: tuple[Divergence, ...] = (
    *("forward_kl", "reverse_kl", "jensen_shannon", "total_variation"),
)
EXITS = {
    "weighted": (Exits(weights="weighted", self_distillation=0.0), "50.5, loop 1 49.8"),
    "aggressive": (Exits(self_distillation=0.0), "52.5, loop 1 47.1"),
    "weighted_self": (Exits(weights="weighted"), "50.4, loop 1 49.9"),
    "aggressive_self": (Exits(), "52.6, loop 1 48.0"),
}
"""Of Gemma, loops 2: the objective, and the few-shot averages of its two exits."""


def _table() -> dict[str, Run]:
    return (
        _full_and_reduced()
        | _initialized()
        | _relaxed()
        | _distilled_on_60b()
        | _with_exits()
    )


def _full_and_reduced() -> dict[str, Run]:
    """Models that are not recursive: Tables 2 and F.1, Figure 4."""
    runs = {}
    for (base, billions), figure in FULL.items():
        # Table F.1 has TinyLlama's pretrained model as its full size.
        table = "Tables 2, F.1" if billions == 15 and base != "tinyllama" else "Table 2"
        runs[f"{base}_full_{billions}b"] = _run(
            base,
            BASES[base],
            base,
            f"{table}, full size",
            f"SlimPajama perplexity {figure}",
            billions=billions,
        )
    for (base, loops), figure in REDUCED.items():
        layers = BASES[base].stack.layers // loops
        runs[f"{base}_reduced_b{loops}_15b"] = _run(
            base,
            reduced(base, loops=loops),
            None,
            f"{F1}, {layers} layers from scratch",
            f"SlimPajama perplexity {figure}",
        )
        runs[f"{base}_reduced_b{loops}_60b"] = _run(
            base,
            reduced(base, loops=loops),
            None,
            "Figure 4, reduced size, distilled",
            "below the recursive model of its size",
            billions=60,
            objective=_distilled(base),
        )
    return runs


def _initialized() -> dict[str, Run]:
    """Recursive models by init: Table F.1, Figures 5, F.1 and F.2."""
    runs = {}
    for (base, loops, init), figure in PERPLEXITY.items():
        stem = f"{base}_b{loops}_{init}"
        runs[f"{stem}_15b"] = _run(
            base,
            recursive(base, loops=loops),
            # The paper's random baseline has no pretrained weights at all.
            None if init == "random" else f"{stem}_start",
            f"{F1}, {loops} loops, {init}",
            f"SlimPajama perplexity {figure}",
        )
        if init == "random":
            runs[f"{stem}_block_15b"] = _run(
                base,
                recursive(base, loops=loops),
                f"{stem}_block_start",
                "no table: a random block between the pretrained embedding and head",
                "between random and lower",
            )
    for base in BASES:
        for variant, (figure, expected) in VARIANTS.items():
            stem = f"{base}_b2_{variant}"
            runs[f"{stem}_15b"] = _run(
                base, recursive(base, loops=2), f"{stem}_start", figure, expected
            )
    return runs


def _relaxed() -> dict[str, Run]:
    """LoRA by base, init, start and rank: Figures 6 and 7a, and Table G.2."""
    runs = {}
    expected = {
        "stepwise": "rank 512 no better than none, the middle ranks worse",
        "average": "better with rank; the best of the inits at 512",
        "lower": "better with rank",
    }
    for base, (init, says), adapters, rank in product(
        BASES, expected.items(), ("svd", "zero"), RANKS
    ):
        figures = ["Table G.2"]
        if base == "gemma":
            figures = ["Figure 7a"] if adapters == "svd" else []
            figures += ["Figure 6"] if rank == 512 else []
        if adapters == "zero":
            says = "below svd; of Gemma by up to 6.5 points"
        stem = f"{base}_b2_{init}_rank{rank}_{adapters}"
        runs[f"{stem}_15b"] = _run(
            base,
            recursive(base, loops=2, rank=rank),
            f"{stem}_start",
            f"{' and '.join(figures) or 'no table'}, {init}, {adapters}",
            says,
        )
    return runs


def _distilled_on_60b() -> dict[str, Run]:
    """Figures 4, 7b and 7c, and the divergences of Table I.1."""
    runs = {}
    for base, loops in LOOPS:
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
    for divergence in DIVERGENCES:
        runs[f"gemma_b2_stepwise_{divergence}_15b"] = _run(
            "gemma",
            recursive("gemma", loops=2),
            "gemma_b2_stepwise_start",
            f"Table I.1, distilled by {divergence.replace('_', ' ')}",
            "forward KL the best of the four",
            objective=_distilled("gemma", divergence),
        )
    return runs


def _with_exits() -> dict[str, Run]:
    """Tables 3 and J.1: exits of the 15B model, then of those of Figure 8."""
    runs = {}
    for kind, (objective, says) in EXITS.items():
        runs[f"gemma_b2_exits_{kind}_15b"] = _run(
            "gemma",
            recursive("gemma", loops=2),
            "rrt_gemma_b2_stepwise_15b",
            f"Table 3, exits, {kind.replace('_', ' and ')}",
            f"few-shot average {says}",
            objective=replace(objective, vocabulary_chunks=CHUNKS),
        )
    for base, loops in LOOPS:
        for rank in (0, *RANKS):
            stem = f"{base}_b{loops}_" + (f"rank{rank}" if rank else "stepwise")
            runs[f"{stem}_exits_15b"] = _run(
                base,
                recursive(base, loops=loops, rank=rank),
                f"rrt_{stem}_60b",
                "Table J.1 and Figure 8, exits of the 60B model",
                "the last loop as it was; loop 1 some points below",
                objective=Exits(vocabulary_chunks=CHUNKS),
            )
    return runs


RUNS = _table()
