"""Small models that between them turn every switch of the variant."""

from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LearnedPositions, Rope
from recurjax.model import ModelConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from tests.variants.transformer import switches as transformer

LENGTH, VOCABULARY = transformer.LENGTH, transformer.VOCABULARY


def small(
    *,
    loops: int = 2,
    sharing: str = "cycle",
    rank: int = 0,
    tie_norms: bool = True,
    loop_cache: str = "own",
    **base,
) -> ModelConfig:
    """A model of width 8 and four layers; `base` is the Transformer's part of it."""
    whole = transformer.small(**({"layers": 4} | base))
    stack = RelaxedRecursiveTransformerConfig(
        transformer=whole.stack,
        loops=loops,
        sharing=sharing,
        rank=rank,
        tie_norms=tie_norms,
        loop_cache=loop_cache,
    )
    return ModelConfig(vocabulary=VOCABULARY, stack=stack, tied_head=whole.tied_head)


NEOX = {
    "head_width": 8,
    "mlp": MlpConfig(kind="gelu", width=12, bias=True),
    "norm": NormConfig(kind="layer", bias=True, eps=1e-5),
    "parallel_residual": True,
    "attention": {
        "position": Rope(fraction=0.25),
        "qkv_bias": True,
        "out_bias": True,
    },
}
LLAMA = {
    "key_heads": 2,
    "mlp": MlpConfig(kind="swiglu", width=12),
    "residual_scale": "inverse_sqrt_depth",
}

SWITCHES = {
    "cycle, untied, rank 3, rings": small(
        rank=3, tie_norms=False, windows=(3, None), **LLAMA
    ),
    "sequence, untied, rank 2": small(
        sharing="sequence", rank=2, tie_norms=False, **NEOX
    ),
    "cycle_rev, three loops, capped rank": small(
        loops=3, sharing="cycle_rev", rank=100, layers=6, **LLAMA
    ),
    "first, rings": small(
        loops=3, rank=2, tie_norms=False, loop_cache="first", layers=6, windows=(3, 5)
    ),
    "first, sequence": small(sharing="sequence", loop_cache="first", **NEOX),
    "first, cycle_rev": small(
        loops=2, sharing="cycle_rev", rank=2, loop_cache="first", windows=(4,)
    ),
    "learned positions, one layer looped": small(
        loops=3,
        layers=3,
        attention={"position": LearnedPositions(length=LENGTH)},
    ),
}
SLOW = frozenset({"first, cycle_rev"})
RARE = frozenset({"first, sequence", "learned positions, one layer looped"})
build = transformer.build
