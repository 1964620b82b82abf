"""Small models that between them turn every switch of RAT and its relatives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import Rope
from recurjax.model import Decoder, ModelConfig
from recurjax.parameters import parameter_name
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.rat import (
    MambaMixerConfig,
    MixerConfig,
    RatConfig,
    RatMixerConfig,
    RecurrentLayerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
    presets,
)

LENGTH = 13
VOCABULARY = 17
WIDTH, HEADS = 8, 4


def small(*pattern: MixerConfig, layers: int | None = None) -> ModelConfig:
    """A model of width 8 that repeats the pattern twice."""
    stack = RatConfig(
        layers=2 * len(pattern) if layers is None else layers,
        width=WIDTH,
        pattern=pattern,
        mlp=MlpConfig(width=12),
        init=InitConfig(output="same"),
    )
    return ModelConfig(vocabulary=VOCABULARY, stack=stack, tied_head=True)


def with_memory(*pattern: MixerConfig, **memory) -> ModelConfig:
    """The same with states of earlier tokens entering every layer."""
    config = small(*pattern)
    memory = MemoryConfig(**{"keys": False, "values": False} | memory)
    stack = dataclasses.replace(config.stack, memory=memory)
    return dataclasses.replace(config, stack=stack)


def rat(**options) -> RatMixerConfig:
    options = {"head_width": 4, "chunk": 4, "groups": 2} | options
    return RatMixerConfig(heads=HEADS, **options)


WINDOW = presets.attention(width=WIDTH, heads=HEADS, window=3)
MAMBA = MambaMixerConfig(state=3, dt_rank=2)
RT = RecurrentLayerConfig(heads=HEADS, key_heads=HEADS, head_width=4)

SWITCHES = {
    "rat": small(rat()),
    "low_rank_by_token_beside_windows": small(
        rat(
            chunk=3,
            groups=1,
            position_of="token",
            position=Rope(base=100.0, fraction=0.5),
            forget_rank=2,
        ),
        WINDOW,
    ),
    "no_positions_chunk_of_one": small(
        rat(chunk=1, groups=4, position=None, output_rank=3)
    ),
    "rnn": small(RnnMixerConfig(heads=2, head_width=6, gate_horizon=LENGTH)),
    "reversed": small(
        ReversedRatMixerConfig(
            heads=HEADS,
            head_width=4,
            chunk=4,
            groups=2,
            gate_horizon=4,
            output_rank=3,
        )
    ),
    "mamba": small(MAMBA),
    "attention_beside_mamba": small(
        presets.attention(width=WIDTH, heads=HEADS),
        MambaMixerConfig(conv=2, state=5, dt_rank=3, expand=3),
    ),
    "rat_beside_mamba": small(rat(), MAMBA),
    "attention_beside_rt": small(
        presets.attention(width=WIDTH, heads=HEADS),
        RecurrentLayerConfig(
            heads=HEADS,
            key_heads=2,
            head_width=4,
            position=Rope(base=100.0),
            qkv_bias=True,
            out_bias=True,
            residual_scale="one",
            block=2,
        ),
    ),
    "rat_beside_rt": small(rat(), RT),
    "rat_with_memory": with_memory(rat(), sources=(1,)),
    "averaged_memories_of_mamba_and_rt": with_memory(
        MAMBA, RT, sources=(1, 4), lags=(1, 2)
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
        values = draw.normal(size=leaf.shape) * (0.5 if name.startswith("w_") else 0.3)
        if name in ("scale", "b_forget"):
            values += 1.0
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, like)
