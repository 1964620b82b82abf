"""Small models that between them turn every switch of the latent memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.layers.norm import NormConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
    MemoryConfig,
)

LENGTH = 9
VOCABULARY = 11
RESET = 3


def small(memory: MemoryConfig | None, **stack) -> ModelConfig:
    """A model of width 8 and two layers, unless said otherwise."""
    sizes = {
        "layers": 2,
        "width": 8,
        "heads": 2,
        "key_heads": 1,
        "head_width": 4,
        "mlp_width": 16,
        "vocabulary": 12,
        "length": LENGTH,
        "windows": "SL",
        "value_gate_channels": 4,
    }
    return ModelConfig(
        vocabulary=VOCABULARY,
        pad_vocabulary_to=4,
        stack=LatentRecurrentTransformerConfig(memory=memory, **sizes | stack),
        final_norm=NormConfig(scale=False, eps=1e-6),
        logit_soft_cap=15.0,
    )


def byte_model(memory: MemoryConfig | None) -> Decoder:
    """A small model of the byte tokenizer's 257 tokens, every parameter drawn."""
    config = small(memory)
    stack = replace(config.stack, vocabulary=260)
    return build(replace(config, vocabulary=257, pad_vocabulary_to=20, stack=stack))


SWITCHES = {
    "baseline": small(None, layers=4, windows="SSL", value_embeddings="alternating"),
    "vanilla": small(
        None, value_embeddings="none", residual_scales=False, input_mixing="none"
    ),
    "every scale": small(
        None,
        input_mixing="dense",
        value_residual="first",
        attention_scale=True,
        mlp_scale=True,
        layers=3,
        windows="L",
    ),
    "shared": small(MemoryConfig(sources=(1,)), value_gate_channels=0),
    "layerwise": small(MemoryConfig(sources=(2,), projection="layerwise"), key_heads=2),
    "keys, averaged lags, reset": small(
        MemoryConfig(
            sources=(1,),
            lags=(1, 2, 3),
            values=False,
            residual=False,
            normed=False,
            reset_token=RESET,
        )
    ),
    "own state": small(
        MemoryConfig(sources=(2,), lags=(0, 1), combine="sum", keys=False)
    ),
    "averaged sources, replacing": small(
        MemoryConfig(sources=(1, 2), replace_layers=1, entry_layers=1),
        value_residual="projected",
    ),
}

RECURRENT = [name for name, model in SWITCHES.items() if model.stack.memory is not None]


def build(model: ModelConfig) -> Decoder:
    """Draws every parameter, so that no gate or scale is at its neutral start."""
    abstract = jax.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * draw(leaf.shape), leaf.dtype), abstract
    )
