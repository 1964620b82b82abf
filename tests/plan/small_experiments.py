"""Every variant small, with shapes that its kernels take."""

from dataclasses import replace
from typing import Any

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig
from recurjax.training.config import TrainingConfig
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import AdamW
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)
from recurjax.variants.latent_recurrent_transformer.objectives import Interleaved
from recurjax.variants.rat import RatConfig, RatMixerConfig
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

VOCABULARY, WIDTH, HEADS, LAYERS = 512, 128, 2, 2
HEAD_WIDTH = WIDTH // HEADS
LENGTHS = {"recurrent_transformer": 32, "rat": 256}
"""Tokens of a row; the others take 1,024, from where attention runs in blocks."""
BATCHES = {"recurrent_transformer": 32}
"""Rows, where not 4: on each of four devices a full block of the kernels."""


def experiment(variant: str, dtype: Any = "bfloat16") -> Experiment:
    """Returns a run of a few rows: more take several times as long to compile."""
    stack, objective, options = VARIANTS[variant]
    return Experiment(
        name=variant,
        model=ModelConfig(vocabulary=VOCABULARY, stack=stack, dtype=dtype, **options),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes()),
        objective=objective,
        optimizer=AdamW(learning_rate=1e-3),
        training=TrainingConfig(
            steps=10, batch=BATCHES.get(variant, 4), length=LENGTHS.get(variant, 1024)
        ),
    )


def wide_experiment(variant: str) -> Experiment:
    """Returns four layers of width 2,048: of these the weights are most of a step."""
    if variant == "recurformer":  # half of the Transformer's heads give way to Mamba
        run = wide_experiment("transformer")
        base: Any = run.model.stack
        stack = RecurFormerConfig(
            transformer=base,
            replaced=(tuple(range(8)),) * base.layers,
            mamba=MambaConfig(),
        )
        return replace(run, model=replace(run.model, stack=stack))
    run = experiment(variant)
    return replace(run, model=replace(run.model, stack=_widened(run.model.stack)))


def _widened(stack: Any) -> Any:
    heads = {"heads": 16, "head_width": 128}
    size = {"layers": 4, "width": 2048}
    if isinstance(stack, RelaxedRecursiveTransformerConfig):
        return replace(stack, transformer=_widened(stack.transformer))
    if isinstance(stack, LatentRecurrentTransformerConfig):
        return replace(stack, mlp_width=4 * 2048, key_heads=16, **heads, **size)
    mlp = replace(stack.mlp, width=4 * 2048)
    if isinstance(stack, RatConfig):
        mixers: Any = stack.pattern
        pattern = tuple(replace(mixer, **heads) for mixer in mixers)
        return replace(stack, pattern=pattern, mlp=mlp, **size)
    if isinstance(stack, RecurrentTransformerConfig):
        return replace(stack, key_heads=16, mlp=mlp, **heads, **size)
    attention = replace(stack.attention, key_heads=16, **heads)
    return replace(stack, attention=attention, mlp=mlp, **size)


VARIANTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "transformer": (
        TransformerConfig(
            layers=LAYERS,
            width=WIDTH,
            attention=AttentionConfig(
                heads=HEADS, key_heads=HEADS, head_width=HEAD_WIDTH
            ),
            mlp=MlpConfig(kind="gelu", width=4 * WIDTH),
        ),
        NextToken(),
        {},
    ),
    "recurrent_transformer": (
        RecurrentTransformerConfig(
            layers=LAYERS,
            width=WIDTH,
            heads=HEADS,
            key_heads=HEADS,
            head_width=HEAD_WIDTH,
            mlp=MlpConfig(kind="gelu", width=4 * WIDTH),
        ),
        NextToken(),
        {},
    ),
    "rat": (
        RatConfig(
            layers=LAYERS,
            width=WIDTH,
            pattern=(
                RatMixerConfig(heads=HEADS, head_width=HEAD_WIDTH, chunk=16, groups=2),
            ),
            mlp=MlpConfig(width=2 * WIDTH),
            remat="block",
        ),
        NextToken(),
        {"tied_head": True},
    ),
    "latent_recurrent_transformer": (
        LatentRecurrentTransformerConfig(
            layers=LAYERS,
            width=WIDTH,
            heads=HEADS,
            key_heads=HEADS,
            head_width=HEAD_WIDTH,
            mlp_width=4 * WIDTH,
            vocabulary=VOCABULARY,
            length=1024,
            windows="L",
            memory=MemoryConfig(sources=(1,)),
        ),
        Interleaved(subsets=1),
        {"final_norm": NormConfig(scale=False, eps=1e-6), "logit_soft_cap": 15.0},
    ),
    "relaxed_recursive_transformer": (
        RelaxedRecursiveTransformerConfig(
            transformer=TransformerConfig(
                layers=2 * LAYERS,
                width=WIDTH,
                attention=AttentionConfig(
                    heads=HEADS, key_heads=HEADS, head_width=HEAD_WIDTH
                ),
                mlp=MlpConfig(kind="swiglu", width=2 * WIDTH),
            ),
            loops=2,
            rank=16,
            tie_norms=False,
        ),
        NextToken(),
        {},
    ),
}
