"""The attention and sliding-window baselines, as a mixer among others."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.initialization import InitConfig
from recurjax.layers.key_value_cache import KeyValueCache, empty_key_value_cache
from recurjax.layers.position import Alibi
from recurjax.layers.self_attention import SelfAttention
from recurjax.types import Array, Tokens
from recurjax.variants.rat.blocked_attention import attend_in_blocks
from recurjax.variants.rat.config import AttentionMixerConfig

_BLOCKS_FROM = 1024  # Shorter sequences' logits fit beside everything else.


class BlockedSelfAttention(SelfAttention):
    """`SelfAttention` that trains on long sequences block by block, off the GPU."""

    def _attend_to_input(self, q, k, v, positions, tokens: Tokens) -> Array:
        config, T = self.config, q.shape[1]
        plain = (
            tokens.segments is None
            and config.soft_cap is None
            and config.implementation is None
            and not isinstance(config.position, Alibi)
        )
        served = jax.default_backend() == "gpu"  # by cuDNN's flash attention
        if not plain or served or T < _BLOCKS_FROM:
            return super()._attend_to_input(q, k, v, positions, tokens)
        scale = config.head_width**-0.5 if config.scale is None else config.scale
        k, v = (jnp.repeat(x, config.heads // config.key_heads, 2) for x in (k, v))
        window = None if (self.window or 0) >= T else self.window
        return attend_in_blocks(q, k, v, scale=scale, window=window)


class AttentionMixer(nnx.Module):
    """`SelfAttention`, whose window's cache is a ring buffer."""

    def __init__(
        self,
        config: AttentionMixerConfig,
        width: int,
        init: InitConfig,
        *,
        layer: Array | int,
        layers: int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.attention = BlockedSelfAttention(
            config.attention,
            width,
            init,
            window=config.window,
            layer=layer,
            layers=layers,
            rngs=rngs,
        )

    def init_cache(self, layers: int, batch: int, length: int, dtype) -> KeyValueCache:
        """Makes an empty cache for `length` tokens, or for the window if it is less."""
        a, window = self.config.attention, self.config.window
        slots = length if window is None else min(length, window + 1)
        return empty_key_value_cache(
            layers, batch, slots, a.key_heads, a.head_width, dtype
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        return self.attention(x, cache, tokens)
