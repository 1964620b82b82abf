"""The attention and sliding-window baselines, as a mixer among others."""

from functools import partial

from flax import nnx
from jaxtyping import Float

from recurjax.layers.attention import (
    KeyValueCache,
    SelfAttention,
    empty_key_value_cache,
    keys_for_queries,
    slots_for,
)
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mesh import sequence_shards
from recurjax.types import Array, Tokens
from recurjax.variants.rat import sequence_parallel
from recurjax.variants.rat.config import AttentionMixerConfig


class ShardedSelfAttention(SelfAttention):
    """`SelfAttention` that also trains with its tokens cut over devices."""

    def _attend_to_input(self, q, k, v, tokens: Tokens) -> Array:
        # Only where the mesh cuts the tokens of a row does anything differ from plain
        # attention.
        if sequence_shards() == 1:
            return super()._attend_to_input(q, k, v, tokens)
        config, scale = self.config, self.config.scale
        mixer = AttentionMixerConfig(attention=config, window=self.window)
        sequence_parallel.check(mixer, q.shape[1])
        part = partial(
            sequence_parallel.attention_part,
            scale=config.head_width**-0.5 if scale is None else scale,
            window=self.window,
        )
        # Parts exchange keys by query head, as the chunk op takes them.
        k, v = (keys_for_queries(x, config.heads) for x in (k, v))
        return sequence_parallel.run(part, (q, k, v, tokens.segments))


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
        self.attention = ShardedSelfAttention(
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
        # A query sees `window` tokens back and itself.
        slots = slots_for(length, window)
        return empty_key_value_cache(
            layers, batch, slots, a.key_heads, a.head_width, dtype
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        return self.attention(x, cache, tokens)
