"""Small models that between them turn every switch of the baseline."""

import jax
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Alibi, LearnedPositions, Rope
from recurjax.layers.self_attention import AttentionConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.transformer import TransformerConfig

LENGTH = 13
VOCABULARY = 17
# Weights large enough that every branch matters to the logits.
INIT = InitConfig(std=0.3, embedding_std=1.0, output="same")


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
            init=INIT,
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
}


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    """Makes the model, its norms and biases moved off their neutral start."""

    @jax.jit
    def make(key):
        model = Decoder(config, rngs=nnx.Rngs(key))
        leaves, structure = jax.tree.flatten(model)
        keys = jax.random.split(key, len(leaves))
        moved = [
            leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype)
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(structure, moved)

    return make(jax.random.key(seed))
