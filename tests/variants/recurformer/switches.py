"""Small models that between them turn every switch of RecurFormer."""

import dataclasses

import numpy as np

from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LearnedPositions
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from tests.variants.transformer import switches as transformer

VOCABULARY = transformer.VOCABULARY
MAMBA = MambaConfig(state=3, dt_rank=2)


def small(
    replaced: tuple[tuple[int, ...], ...],
    *,
    mamba: MambaConfig = MAMBA,
    **base,
) -> ModelConfig:
    """A model of width 8 whose base the rest describes."""
    model = transformer.small(layers=len(replaced), **base)
    stack = RecurFormerConfig(transformer=model.stack, replaced=replaced, mamba=mamba)
    return dataclasses.replace(model, stack=stack)


SWITCHES = {
    # Groups of two that lose none, one or both of their heads; a layer of each edge.
    "ragged_groups": small(
        ((0, 3), (), (0, 1, 2, 3)),
        key_heads=2,
        mlp=MlpConfig(kind="swiglu", width=12),
    ),
    "a_whole_group_biases_parallel": small(
        ((1, 2, 3, 4), (0, 1, 2)),
        heads=6,
        key_heads=2,
        mlp=MlpConfig(kind="gelu", width=12, bias=True),
        norm=NormConfig(kind="layer", bias=True, eps=1e-5),
        parallel_residual=True,
        attention={"qkv_bias": True, "out_bias": True},
        mamba=MambaConfig(conv=2, state=5, dt_rank=3, expand=3),
    ),
    "head_norms_caps_and_a_window_layer": small(
        ((2,), ()),
        windows=(None, 4),
        attention={"qk_norm": NormConfig(scale=False), "soft_cap": 3.0, "scale": 0.6},
    ),
    "learned_positions": small(
        ((0, 2),),
        key_heads=1,
        attention={"position": LearnedPositions(length=transformer.LENGTH)},
        model={"tied_head": True},
    ),
}


def build(config: ModelConfig) -> Decoder:
    """Makes the model; decays and steps are such that the state matters."""
    model = transformer.build(config)
    draw = np.random.default_rng(4)
    for block in model.stack.layers:
        mamba = getattr(block.attention, "mamba", None)
        if mamba is not None:
            for name in ("a_log", "b_dt"):
                weight = getattr(mamba, name)
                weight[...] = draw.normal(size=weight.shape).astype(np.float32)
    return model
