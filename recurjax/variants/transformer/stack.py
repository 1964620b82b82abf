"""The Transformer stack: a scan over repeats of the window pattern."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from recurjax.layers.key_value_cache import KeyValueCache, empty_key_value_cache
from recurjax.layers.layer_scan import scan_layers
from recurjax.layers.position import LearnedPositions, PositionEmbedding
from recurjax.layers.row_sharding import keep_rows_apart
from recurjax.types import Array, Tokens
from recurjax.variants.transformer.block import TransformerBlock
from recurjax.variants.transformer.config import TransformerConfig


class TransformerCache(NamedTuple):
    """Where the rows stand, and one cache for each place in the window pattern."""

    position: Int[Array, " B"]
    groups: tuple[KeyValueCache, ...]


class TransformerStack(nnx.Module):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        P = len(config.windows)
        repeats = config.layers // P
        groups = []
        for place, window in enumerate(config.windows):

            def block(key: Array, layer: Array, window=window) -> TransformerBlock:
                rngs = nnx.Rngs(params=key)
                return TransformerBlock(config, window=window, layer=layer, rngs=rngs)

            keys = jax.random.split(rngs.params(), repeats)
            groups.append(jax.vmap(block)(keys, place + P * jnp.arange(repeats)))
        self.blocks = nnx.List(groups)
        position = config.attention.position
        self.position = (
            PositionEmbedding(position, config.width, config.init, rngs=rngs)
            if isinstance(position, LearnedPositions)
            else None
        )

    def init_cache(self, batch: int, length: int, dtype) -> TransformerCache:
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
        return TransformerCache(position=jnp.zeros(batch, jnp.int32), groups=groups)

    def __call__(
        self, x: Float[Array, "B T D"], cache: TransformerCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], TransformerCache]:
        T = x.shape[1]
        training = all(group.slots == 0 for group in cache.groups)
        if self.position is not None:
            start = jnp.zeros(1, jnp.int32) if training else cache.position
            x = self.position(x, start[:, None] + jnp.arange(T))

        def repeat(carry, blocks_and_layer):
            x, groups = carry
            x = keep_rows_apart(x)
            blocks, layer = blocks_and_layer
            written = []
            for block, group in zip(blocks, groups, strict=True):
                group = group._replace(position=cache.position, layer=layer)
                x, group = block(x, group, tokens)
                written.append(group)
            return (x, tuple(written)), None

        repeats = self.config.layers // len(self.config.windows)
        (x, groups), _ = scan_layers(
            repeat,
            (x, cache.groups),
            (tuple(self.blocks), jnp.arange(repeats, dtype=jnp.int32)),
            remat=self.config.remat,
            unroll=min(self.config.unroll, repeats),
            cached=not training,
        )
        if training:
            return x, cache
        count = T if tokens.lengths is None else tokens.lengths
        groups = tuple(
            group._replace(position=old.position, layer=old.layer)
            for group, old in zip(groups, cache.groups, strict=True)
        )
        return x, TransformerCache(position=cache.position + count, groups=groups)
