"""A RecurFormer: a Transformer, the heads replaced by Mamba, and what it costs."""

from dataclasses import dataclass
from typing import NamedTuple

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mamba import MambaConfig, mamba_flops, mamba_weights
from recurjax.layers.position import Alibi
from recurjax.layers.stack import StackFacts
from recurjax.ranges import NonNegativeInt, check_ranges
from recurjax.variants.transformer.config import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurFormerConfig(StackFacts):
    """A Transformer some of whose query heads are replaced by one Mamba a layer.

    Attributes:
      transformer: the complete base: its norms, positions, MLPs and all its heads.
      replaced: for each layer, the query heads that Mamba replaces, ascending. With
        none in any layer the model is bit-identical to the base.
      mamba: the Mamba mixers, with the same sizes in every layer.
    """

    transformer: TransformerConfig
    replaced: tuple[tuple[NonNegativeInt, ...], ...]
    mamba: MambaConfig

    def __post_init__(self):
        check_ranges(self)
        base, H = self.transformer, self.transformer.attention.heads
        if len(self.replaced) != base.layers:
            raise ValueError(
                "RecurFormerConfig: replaced must have an entry for each of "
                f"{base.layers} layers, got {len(self.replaced)}"
            )
        for layer, heads in enumerate(self.replaced):
            if list(heads) != sorted(set(heads)) or not set(heads) <= set(range(H)):
                raise ValueError(
                    f"RecurFormerConfig: heads of layer {layer} must be from 0 to "
                    f"{H - 1}, ascending and each once, got {heads}"
                )
            if heads and base.kind_of(layer).window is not None:
                raise ValueError(
                    f"RecurFormerConfig: layer {layer} has a window, which bounds what "
                    "its heads read: replace heads of layers without one"
                )
        attention = base.attention
        positions = [kind.position for kind in base.pattern]
        if any(self.replaced) and any(isinstance(p, Alibi) for p in positions):
            raise ValueError(
                "RecurFormerConfig: heads with ALiBi cannot be replaced, because "
                "its slopes depend on the number of heads"
            )
        norms = attention.qk_norm is not None and attention.qk_norm_over == "full"
        if any(self.replaced) and norms:
            raise ValueError(
                "RecurFormerConfig: heads with qk_norm over all heads cannot be "
                "replaced, because the norm would change: use a norm per head"
            )

    @property
    def layers(self) -> int:
        """L."""
        return self.transformer.layers

    @property
    def width(self) -> int:
        """D, the model width."""
        return self.transformer.width

    @property
    def init(self) -> InitConfig:
        """The base's."""
        return self.transformer.init

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None: no limit."""
        return self.transformer.max_length

    def heads(self, layer: int) -> "LayerHeads":
        """Returns which heads of a layer attend, and which keys they need."""
        return split_heads(self.transformer, self.replaced[layer])

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs per token at length T, without embedding and head.

        As the base's, 6 a weight of every product; layers' heads: `mixing_flops`.
        """
        base, D = self.transformer, self.width
        # The MLPs are the base's, whatever heads are left.
        mlp = base.mlp.weights(D)
        mixing = (self.mixing_flops(layer, length) for layer in range(base.layers))
        return 6.0 * base.layers * mlp + sum(mixing)

    def mixing_flops(self, layer: int, length: int) -> float:
        """Counts those of a layer's heads.

        Attention for the heads that are left, and `mamba_flops` for the others.
        """
        base, heads = self.transformer, self.heads(layer)
        a, R, K = base.attention, len(heads.remaining), len(heads.key_heads)
        # Queries of the remaining heads, the keys that they read, all values, the full
        # output matrix.
        projections = self.width * a.head_width * (R + K + a.key_heads + a.heads)
        window = base.kind_of(layer).window
        seen = length if window is None else min(window + 1, length)
        total = 6.0 * projections + 12.0 * R * a.head_width * seen
        if heads.replaced:
            total += mamba_flops(self.mamba, heads.mamba_width)
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerHeads:
    """The division of one layer's heads.

    Attributes:
      replaced: query heads whose place Mamba takes, ascending.
      remaining: query heads that attend, ascending.
      key_heads: key heads that a remaining head reads, ascending: only they have keys
        and a cache.
      key_head_of: for each remaining head, its entry of `key_heads`.
      group_of: for each replaced head, the key head whose values it would have read.
      mamba_width: d_m, the replaced heads side by side.
    """

    replaced: tuple[int, ...]
    remaining: tuple[int, ...]
    key_heads: tuple[int, ...]
    key_head_of: tuple[int, ...]
    group_of: tuple[int, ...]
    mamba_width: int


def split_heads(base: TransformerConfig, replaced: tuple[int, ...]) -> LayerHeads:
    """Divides a layer's heads: query head h reads key head h // (H / K)."""
    a = base.attention
    group = a.heads // a.key_heads
    # Groups of query heads share a key head: a key head goes with its last query head.
    remaining = tuple(head for head in range(a.heads) if head not in set(replaced))
    key_heads = tuple(sorted({head // group for head in remaining}))
    return LayerHeads(
        replaced=replaced,
        remaining=remaining,
        key_heads=key_heads,
        key_head_of=tuple(key_heads.index(head // group) for head in remaining),
        group_of=tuple(head // group for head in replaced),
        mamba_width=len(replaced) * a.head_width,
    )


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
        """Its share of the base's."""
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
    keys_values = states = total = 0
    for layer in range(base.layers):
        # A layer with a window keeps no more than it; none of its heads is replaced.
        slots = base.kind_of(layer).slots(length)
        heads = config.heads(layer)
        keys_values += 2 * len(heads.key_heads) * E * slots * value_bytes
        total += 2 * base.attention.key_heads * E * slots * value_bytes
        channels = config.mamba.expand * heads.mamba_width
        states += channels * (config.mamba.conv + config.mamba.state) * STATE_BYTES
    return CacheBytes(keys_values, states, total)


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
