"""Small models that between them turn every switch of the baseline."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import (
    Alibi,
    LearnedPositions,
    Llama3Scaling,
    LongScaling,
    Rope,
)
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import parameter_name
from recurjax.variants.transformer import TransformerConfig

LENGTH = 13
VOCABULARY = 17


def small(
    *,
    heads: int = 4,
    key_heads: int = 4,
    head_width: int = 4,
    mlp: MlpConfig | None = None,
    layers: int = 2,
    model: dict | None = None,
    attention: dict | None = None,
    **stack,
) -> ModelConfig:
    """A model of width 8; `attention`, `model` and the rest override its parts."""
    return ModelConfig(
        vocabulary=VOCABULARY,
        stack=TransformerConfig(
            layers=layers,
            width=8,
            attention=AttentionConfig(
                heads=heads,
                key_heads=key_heads,
                head_width=head_width,
                **(attention or {}),
            ),
            mlp=MlpConfig(width=12) if mlp is None else mlp,
            **stack,
        ),
        **(model or {}),
    )


SWITCHES = {
    "rope_grouped_ring": small(
        key_heads=2,
        mlp=MlpConfig(kind="swiglu", width=12),
        layers=4,
        windows=(3, None),
        residual_scale="inverse_sqrt_depth",
        model={"pad_vocabulary_to": 8},
    ),
    "partial_rope_parallel_biases": small(
        head_width=8,
        mlp=MlpConfig(kind="gelu", width=12, bias=True),
        norm=NormConfig(kind="layer", bias=True, eps=1e-5),
        parallel_residual=True,
        attention={
            "position": Rope(fraction=0.25),
            "qkv_bias": True,
            "out_bias": True,
        },
    ),
    "alibi_full_norm_rings": small(
        heads=6,
        key_heads=3,
        mlp=MlpConfig(kind="relu_squared", width=12),
        windows=(5, 2),
        attention={
            "position": Alibi(max_bias=4.0),
            "qk_norm": NormConfig(kind="layer", eps=1e-5),
            "qk_norm_over": "full",
        },
    ),
    "learned_capped_multi_query": small(
        key_heads=1,
        mlp=MlpConfig(kind="geglu_tanh", width=12),
        norm=NormConfig(one_plus=True),
        attention={
            "position": LearnedPositions(length=LENGTH),
            "soft_cap": 2.0,
            "scale": 0.7,
        },
        model={
            "tied_head": True,
            "embedding_scale": "sqrt_width",
            "logit_soft_cap": 5.0,
        },
    ),
    "no_positions_head_norm_capped_ring": small(
        key_heads=2,
        mlp=MlpConfig(kind="geglu", width=12, bias=True),
        windows=(0, 4),
        attention={
            "position": None,
            "qk_norm": NormConfig(scale=False),
            "soft_cap": 3.0,
        },
    ),
    # As Gemma 3 with layers that are left over behind the pattern, and SmolLM3.
    "norms_both_positions_by_layer": small(
        key_heads=2,
        mlp=MlpConfig(kind="geglu_tanh", width=12),
        layers=5,
        norm=NormConfig(one_plus=True),
        norms="both",
        windows=(3, 3, None),
        positions=(
            Rope(base=100.0),
            Rope(scaling=Llama3Scaling(factor=8.0, low=1.0, high=4.0, length=8)),
            None,
        ),
    ),
    # As OLMo-2 and Phi-3: a rope that asks for the length keeps no ring.
    "norms_after_long_rope": small(
        mlp=MlpConfig(kind="swiglu", width=12),
        norms="after",
        windows=(5,),
        attention={
            "position": Rope(
                scaling=LongScaling(
                    short=(1.0, 1.5), long=(2.0, 4.0), length=4, amplitude=1.2
                )
            ),
            "qk_norm": NormConfig(),
            "qk_norm_over": "full",
        },
    ),
}


def build(config: ModelConfig) -> Decoder:
    """Makes the model with all weights away from their neutral start.

    Drawn by numpy: to compile jax's generator for each shape takes longer than a test.
    """
    draw = np.random.default_rng(0)
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))

    def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = parameter_name(path).rsplit(".", 1)[-1]
        values = draw.normal(size=leaf.shape) * (0.3 if name.startswith("w_") else 0.1)
        if name == "scale":
            values += 1.0
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, like)
