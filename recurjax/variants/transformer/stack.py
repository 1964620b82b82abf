"""The Transformer stack: a scan over repeats of the window pattern."""

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.attention import empty_key_value_cache, slots_for
from recurjax.layers.mesh import UncutStack
from recurjax.layers.position import (
    check_cache_length,
    learned_positions,
    with_positions,
)
from recurjax.layers.stack import (
    CacheRows,
    PatternCache,
    layer_states,
    make_blocks,
    run_blocks,
)
from recurjax.types import Array, Tokens
from recurjax.variants.transformer.block import TransformerBlock
from recurjax.variants.transformer.config import TransformerConfig


class TransformerStack(CacheRows, UncutStack[TransformerConfig]):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> TransformerBlock:
            window = config.windows[place]
            return TransformerBlock(config, window=window, layer=layer, rngs=rngs)

        self.blocks = nnx.List(
            make_blocks(
                block, layers=config.layers, pattern=len(config.windows), rngs=rngs
            )
        )
        self.position = learned_positions(
            config.attention.position, config.width, config.init, rngs=rngs
        )

    def init_cache(self, batch: int, length: int, dtype) -> PatternCache:
        """Makes the cache for `length` tokens a row; a window's is a ring buffer.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: of keys and values.

        Raises:
          ValueError: learned positions end before `length`.
        """
        # Layers of one place in the window pattern share an array, one entry a repeat.
        repeats = self.config.layers // len(self.config.windows)
        return empty_cache(self.config, repeats, batch, length, dtype)

    def __call__(
        self, x: Float[Array, "B T D"], cache: PatternCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], PatternCache]:
        return run_blocks(
            self.blocks,
            self._placed(x, cache),
            cache,
            tokens,
            remat=self.config.remat,
            unroll=self.config.unroll,
        )

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first layer, and what leaves each."""
        # A cache of length 0: whole rows, as in training.
        cache = self.init_cache(x.shape[0], 0, x.dtype)
        x = self._placed(x, cache)
        return layer_states(self.blocks, x, cache, tokens)

    # In training every row starts at position 0, whatever the empty cache holds.
    def _placed(self, x: Array, cache: PatternCache) -> Array:
        return with_positions(x, self.position, cache.position, training=cache.training)


def empty_cache(
    config: TransformerConfig, repeats: int, batch: int, length: int, dtype
) -> PatternCache:
    """Makes a cache with `repeats` entries for each place in the window pattern.

    Raises:
      ValueError: learned positions end before `length`.
    """
    check_cache_length("TransformerStack", length, config.max_length)
    a = config.attention
    groups = tuple(
        empty_key_value_cache(
            repeats,
            batch,
            slots_for(length, window),
            a.key_heads,
            a.head_width,
            dtype,
        )
        for window in config.windows
    )
    return PatternCache(position=jnp.zeros(batch, jnp.int32), groups=groups)
