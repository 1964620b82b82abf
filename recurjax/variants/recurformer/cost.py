"""What a RecurFormer keeps of the past, and what it adds to its base."""

from typing import NamedTuple

from recurjax.layers.attention import slots_for
from recurjax.variants.recurformer.config import RecurFormerConfig, mamba_weights

STATE_BYTES = 4
"""Mamba's inputs and states are float32, whatever keys and values are."""


class CacheBytes(NamedTuple):
    """Bytes a row of T tokens keeps, in all layers.

    Attributes:
      keys_values: grows with T.
      states: does not.
      base: what the Transformer with all its heads keeps.
    """

    keys_values: int
    states: int
    base: int

    @property
    def share(self) -> float:
        """Of the base's."""
        return (self.keys_values + self.states) / self.base


def cache_bytes(
    config: RecurFormerConfig, length: int, *, value_bytes: int = 2
) -> CacheBytes:
    """Counts a row's cache: (2 K_kept E T b + n E expand (conv 4 + N 4)) a layer.

    Source: the paper's cache size, with its states in float32. A key head is kept as
    long as one remaining head reads it, so under grouped queries the share can stay far
    above 1 - beta.

    Args:
      length: T, in tokens.
      value_bytes: b, of a key's or value's number.
    """
    base, E = config.transformer, config.transformer.attention.head_width
    keys_values = states = whole = 0
    for layer in range(base.layers):
        # A layer with a window keeps no more than it; none of its heads is replaced.
        window = base.windows[layer % len(base.windows)]
        slots = slots_for(length, window)
        heads = config.heads(layer)
        keys_values += 2 * len(heads.key_heads) * E * slots * value_bytes
        whole += 2 * base.attention.key_heads * E * slots * value_bytes
        channels = config.mamba.expand * heads.mamba_width
        states += channels * (config.mamba.conv + config.mamba.state) * STATE_BYTES
    return CacheBytes(keys_values, states, whole)


def added_parameters(config: RecurFormerConfig) -> int:
    """Counts the mixers' numbers less the queries and keys that went: the growth.

    Replacing heads shrinks the cache and grows the model: at d_m 3712 (29 heads of 128)
    and rank 256 one mixer has 87M numbers.
    """
    base, a = config.transformer, config.transformer.attention
    total = 0
    for layer in range(base.layers):
        heads = config.heads(layer)
        if not heads.replaced:
            continue
        channels = config.mamba.expand * heads.mamba_width
        # b_conv, b_dt, D and A of each channel.
        total += mamba_weights(config.mamba, heads.mamba_width)
        total += channels * (3 + config.mamba.state)
        # Queries of the replaced heads, keys that nobody reads any more, and their
        # biases.
        gone = a.heads - len(heads.remaining) + a.key_heads - len(heads.key_heads)
        total -= gone * a.head_width * (base.width + a.qkv_bias)
    return total
