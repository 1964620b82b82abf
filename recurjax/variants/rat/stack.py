"""The RAT stack: a scan over repeats of the pattern of mixers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from recurjax.layers.layer_scan import scan_layers
from recurjax.layers.row_sharding import keep_rows_apart
from recurjax.types import Array, Cache, Tokens
from recurjax.variants.rat.block import RatBlock
from recurjax.variants.rat.config import RatConfig


class RatStackCache(NamedTuple):
    """Where the rows stand, and one cache for each place in the pattern."""

    position: Int[Array, " B"]
    groups: tuple[Cache, ...]


class RatStack(nnx.Module):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern."""

    def __init__(self, config: RatConfig, *, rngs: nnx.Rngs):
        self.config = config
        P = len(config.pattern)
        repeats = config.layers // P
        groups = []
        for place, mixer in enumerate(config.pattern):

            def block(key: Array, layer: Array, mixer=mixer) -> RatBlock:
                rngs = nnx.Rngs(params=key)
                return RatBlock(config, mixer=mixer, layer=layer, rngs=rngs)

            keys = jax.random.split(rngs.params(), repeats)
            groups.append(jax.vmap(block)(keys, place + P * jnp.arange(repeats)))
        self.blocks = nnx.List(groups)

    def init_cache(self, batch: int, length: int, dtype) -> RatStackCache:
        """Makes the cache for `length` tokens a row.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: of keys and values; recurrent states are at least float32.
        """
        repeats = self.config.layers // len(self.config.pattern)
        groups = tuple(
            block.mixer.init_cache(repeats, batch, length, dtype)
            for block in self.blocks
        )
        return RatStackCache(position=jnp.zeros(batch, jnp.int32), groups=groups)

    def __call__(
        self, x: Float[Array, "B T D"], cache: RatStackCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], RatStackCache]:
        training = all(group.slots == 0 for group in cache.groups)

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

        repeats = self.config.layers // len(self.config.pattern)
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
        count = x.shape[1] if tokens.lengths is None else tokens.lengths
        groups = tuple(
            group._replace(position=old.position, layer=old.layer)
            for group, old in zip(groups, cache.groups, strict=True)
        )
        return x, RatStackCache(position=cache.position + count, groups=groups)
