"""The Transformer stack: a scan over repeats of the pattern of layers."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.attention import empty_key_value_cache
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
    """L blocks; each of `blocks` stacks the layers that the config's `stacked` says."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> TransformerBlock:
            kind = config.pattern[place]
            return TransformerBlock(config, kind=kind, layer=layer, rngs=rngs)

        self.blocks = nnx.List(
            make_blocks(
                block, layers=config.layers, pattern=len(config.pattern), rngs=rngs
            )
        )
        self.position = learned_positions(
            config.attention.position, config.width, config.init, rngs=rngs
        )

    def init_cache(self, batch: int, length: int, dtype) -> PatternCache:
        """Creates the cache for `length` tokens per row; a window's is a ring buffer.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: dtype of keys and values.

        Raises:
          ValueError: learned positions end before `length`.
        """
        # Layers of one module share an array, one entry each.
        entries = [len(numbers) for numbers in self.config.stacked]
        return empty_cache(self.config, entries, batch, length, dtype)

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
        # A cache of length 0: full rows, as in training.
        cache = self.init_cache(x.shape[0], 0, x.dtype)
        x = self._placed(x, cache)
        return layer_states(self.blocks, x, cache, tokens)

    # In training every row starts at position 0, whatever the empty cache holds.
    def _placed(self, x: Array, cache: PatternCache) -> Array:
        return with_positions(x, self.position, cache.position, training=cache.training)


def empty_cache(
    config: TransformerConfig, entries: Sequence[int], batch: int, length: int, dtype
) -> PatternCache:
    """Creates a cache with as many entries as each of a stack's modules has layers.

    Raises:
      ValueError: learned positions end before `length`.
    """
    check_cache_length("TransformerStack", length, config.max_length)
    a, pattern = config.attention, config.pattern
    groups = tuple(
        empty_key_value_cache(
            layers,
            batch,
            pattern[block % len(pattern)].slots(length),
            a.key_heads,
            a.head_width,
            dtype,
        )
        for block, layers in enumerate(entries)
    )
    return PatternCache(position=jnp.zeros(batch, jnp.int32), groups=groups)
