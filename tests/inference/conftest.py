"""One tiny model for all tests here, and one whose text is known beforehand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.types import Tokens
from recurjax.variants.transformer import TransformerConfig
from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]

STACK = TransformerConfig(
    layers=2,
    width=16,
    attention=AttentionConfig(heads=2, key_heads=1, head_width=8),
    mlp=MlpConfig(width=32),
)
CONFIG = ModelConfig(vocabulary=257, stack=STACK)


def build(*, stack: TransformerConfig = STACK, **changes) -> Decoder:
    """Fills a model with normal weights; jax's own draws take longer to compile."""
    config = replace(CONFIG, stack=stack, **changes)
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(1)

    def weight(path, leaf):
        name = jax.tree_util.keystr(path)
        std = 1.0 if "embedding" in name or "position" in name else 0.5
        drawn = random.normal(scale=std, size=leaf.shape)
        return jnp.asarray(
            np.ones(leaf.shape) if "scale" in name else drawn, leaf.dtype
        )

    return jax.tree_util.tree_map_with_path(weight, abstract)


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """Nearly all that these tests take is compiling: tiny models, a few tokens each."""


@pytest.fixture(scope="session")
def model() -> Decoder:
    return build()


@pytest.fixture(scope="session")
def cycle(model):
    """Makes models that continue each byte of a text by its next, round and round.

    The blocks add nothing, so a token's successor is the head's column that points
    along the token's own normed embedding. No byte may occur twice.
    """

    def make(text: str) -> Decoder:
        data = list(text.encode())
        assert len(set(data)) == len(data)
        table = np.random.default_rng(0).normal(size=(257, 16)).astype(np.float32)
        table /= np.linalg.norm(table, axis=1, keepdims=True)
        head = np.zeros((16, 257), np.float32)
        for current, following in zip(data, data[1:] + data[:1], strict=True):
            head[:, following] = table[current]

        def weight(path, leaf):
            name = jax.tree_util.keystr(path)
            if "stack" in name:
                return jnp.zeros_like(leaf)
            return jnp.asarray(
                table if "embedding" in name else head if "head" in name else leaf
            )

        return jax.tree_util.tree_map_with_path(weight, model)

    return make


def following_logits(model: Decoder, prompt, result) -> np.ndarray:
    """Returns the logits for each new token by one plain forward without a cache."""
    whole = [*prompt, *result]
    read = whole[:-1]  # the last new token is never read
    padded = np.zeros(model.config.max_length or 64, np.int32)
    padded[: len(read)] = read
    return np.asarray(_forward(model, padded))[len(prompt) - 1 : len(read)]


@jax.jit
def _forward(model: Decoder, ids):
    return model(Tokens(ids[None]), model.init_cache(1, 0))[0][0]
