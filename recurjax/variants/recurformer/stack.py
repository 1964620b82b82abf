"""The RecurFormer stack: layers of different shapes, one after another."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from recurjax.layers.attention import empty_key_value_cache
from recurjax.layers.mamba import empty_mamba_cache
from recurjax.layers.mesh import UncutStack, keep_rows_apart
from recurjax.layers.position import (
    check_cache_length,
    learned_positions,
    with_positions,
)
from recurjax.layers.stack import CacheRows, rematerialize
from recurjax.types import Array, Tokens
from recurjax.variants.recurformer.block import LayerCache, RecurFormerBlock
from recurjax.variants.recurformer.config import RecurFormerConfig


class RecurFormerCache(NamedTuple):
    """The rows' positions, and each layer's cache."""

    position: Int[Array, " B"]
    layers: tuple[LayerCache, ...]


class RecurFormerStack(CacheRows, UncutStack[RecurFormerConfig]):
    """L layers, unrolled: each has heads, keys and channels of its own number."""

    def __init__(self, config: RecurFormerConfig, *, rngs: nnx.Rngs):
        self.config = config
        # A key per layer, as if the layers were stacked.
        keys = jax.random.split(rngs.params(), config.layers)

        def block(key: Array, layer: int) -> RecurFormerBlock:
            return RecurFormerBlock(config, layer=layer, rngs=nnx.Rngs(params=key))

        # A trace of its own for each: in one long trace every key that is drawn costs
        # flax a walk over all that was traced before it.
        self.layers = nnx.List(
            [
                jax.jit(partial(block, layer=layer))(key)
                for layer, key in enumerate(keys)
            ]
        )
        position = config.transformer.attention.position
        self.position = learned_positions(
            position, config.width, config.init, rngs=rngs
        )

    def init_cache(self, batch: int, length: int, dtype) -> RecurFormerCache:
        """Creates the cache for `length` tokens per row.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: dtype of keys and values; Mamba's states are float32.

        Raises:
          ValueError: learned positions end before `length`.
        """
        config = self.config
        longest = config.transformer.max_length
        check_cache_length("RecurFormerStack", length, longest)
        layers = tuple(
            layer_cache(config, layer, batch, length, dtype)
            for layer in range(config.layers)
        )
        return RecurFormerCache(jnp.zeros(batch, jnp.int32), layers)

    def __call__(
        self, x: Float[Array, "B T D"], cache: RecurFormerCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], RecurFormerCache]:
        T = x.shape[1]
        training = cache.layers[0].keys_values.slots == 0
        x = self._placed(x, cache)
        run = rematerialize(
            # Layers differ in shape, so nothing is scanned and the compiler could merge
            # what is computed again: see `rematerialize`.
            lambda block, x, entry: block(x, entry, tokens),
            self.config.transformer.remat,
            scanned=False,
        )
        written = []
        for block, entry in zip(self.layers, cache.layers, strict=True):
            # The position of the rows is stored once for all layers.
            at = entry.keys_values._replace(position=cache.position)
            x, new = run(block, keep_rows_apart(x), entry._replace(keys_values=at))
            back = new.keys_values._replace(position=entry.keys_values.position)
            written.append(new._replace(keys_values=back))
        if training:
            return x, cache
        count = T if tokens.lengths is None else tokens.lengths
        return x, RecurFormerCache(cache.position + count, tuple(written))

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first layer, and what leaves each."""
        cache = self.init_cache(x.shape[0], 0, x.dtype)
        run = jax.jit(lambda block, x, entry: block(x, entry, tokens)[0])
        x = self._placed(x, cache)
        yield x
        for block, entry in zip(self.layers, cache.layers, strict=True):
            at = entry.keys_values._replace(position=cache.position)
            x = run(block, x, entry._replace(keys_values=at))
            yield x

    def _placed(self, x: Array, cache: RecurFormerCache) -> Array:
        """Adds the learned positions, if there are any."""
        training = cache.layers[0].keys_values.slots == 0
        return with_positions(x, self.position, cache.position, training=training)


def layer_cache(
    config: RecurFormerConfig, layer: int, batch: int, length: int, dtype
) -> LayerCache:
    """Makes one layer's empty cache; a window's is a ring buffer."""
    base, heads = config.transformer, config.heads(layer)
    keys_values = empty_key_value_cache(
        1,
        batch,
        base.kind_of(layer).slots(length),
        len(heads.key_heads),
        base.attention.head_width,
        dtype,
    )
    width = heads.mamba_width if length else 0
    return LayerCache(keys_values, empty_mamba_cache(config.mamba, width, batch, dtype))
