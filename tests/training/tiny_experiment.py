"""The smallest run that uses all of the trainer; an experiment file as well."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.experiment import Experiment
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.variants.transformer import TransformerConfig


def config() -> Experiment:
    return Experiment(
        name="tiny",
        model=ModelConfig(
            vocabulary=257,
            tied_head=True,
            stack=TransformerConfig(
                layers=2,
                width=16,
                attention=AttentionConfig(heads=4, key_heads=2, head_width=4),
                mlp=MlpConfig(kind="swiglu", width=32),
            ),
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(), prefetch=0),
        optimizer=AdamW(learning_rate=1e-2),
        schedule=Cosine(warmup_steps=2, start=0.1),
        training=TrainingConfig(
            steps=12, batch=8, length=16, log_every=1, checkpoint_every=3
        ),
        evaluation=EvaluationConfig(every=4, batches=2),
    )


def changed(experiment: Experiment, **sections: dict[str, Any]) -> Experiment:
    """Replaces fields of sections: changed(e, training={"steps": 3})."""
    new = {
        name: dataclasses.replace(getattr(experiment, name), **fields)
        for name, fields in sections.items()
    }
    return dataclasses.replace(experiment, **new)


def drawn(model: ModelConfig, *, scale: float = 1.0) -> Decoder:
    """Fills a model with normal weights; jax's own draws take long to compile."""
    abstract = jax.eval_shape(
        lambda key: Decoder(model, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(
        lambda leaf: jnp.asarray(scale * draw(leaf.shape), leaf.dtype), abstract
    )
