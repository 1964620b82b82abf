"""The Transformer stack: a scan over repeats of the window pattern."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.cache_rows import CacheRows
from recurjax.layers.key_value_cache import empty_key_value_cache
from recurjax.layers.mesh_axes import UncutStack
from recurjax.layers.pattern_stack import PatternCache, make_blocks, run_blocks
from recurjax.layers.position import LearnedPositions, PositionEmbedding
from recurjax.types import Array, Tokens
from recurjax.variants.transformer.block import TransformerBlock
from recurjax.variants.transformer.config import TransformerConfig


class TransformerStack(CacheRows, UncutStack):
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
        position = config.attention.position
        self.position = (
            PositionEmbedding(position, config.width, config.init, rngs=rngs)
            if isinstance(position, LearnedPositions)
            else None
        )

    def init_cache(self, batch: int, length: int, dtype) -> PatternCache:
        """Makes the cache for `length` tokens a row; a window's is a ring buffer.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: of keys and values.

        Raises:
          ValueError: learned positions end before `length`.
        """
        config = self.config
        if self.position is not None and length > self.position.config.length:
            raise ValueError(
                f"TransformerStack: a cache of {length} tokens needs as many learned "
                f"positions, the table has {self.position.config.length}"
            )
        a = config.attention
        repeats = config.layers // len(config.windows)
        groups = tuple(
            empty_key_value_cache(
                repeats,
                batch,
                length if window is None else min(length, window + 1),
                a.key_heads,
                a.head_width,
                dtype,
            )
            for window in config.windows
        )
        return PatternCache(position=jnp.zeros(batch, jnp.int32), groups=groups)

    def __call__(
        self, x: Float[Array, "B T D"], cache: PatternCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], PatternCache]:
        if self.position is not None:
            start = jnp.zeros(1, jnp.int32) if cache.training else cache.position
            x = self.position(x, start[:, None] + jnp.arange(x.shape[1]))
        return run_blocks(
            self.blocks,
            x,
            cache,
            tokens,
            remat=self.config.remat,
            unroll=self.config.unroll,
        )
