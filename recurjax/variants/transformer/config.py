"""The config of the Transformer stack, and its FLOPs."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from recurjax.layers.attention import AttentionConfig, slots_for
from recurjax.layers.initialization import InitConfig
from recurjax.layers.linear import Maps
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import (
    Alibi,
    LearnedPositions,
    PositionConfig,
    Rope,
    longest_sequence,
)
from recurjax.layers.stack import Remat, StackFacts, stacked_layers
from recurjax.ranges import NonNegativeInt, PositiveInt, check_ranges


class LayerKind(NamedTuple):
    """The properties of one layer of a pattern.

    Attributes:
      window: how far back it sees, or None.
      position: its encoding of positions, or None.
    """

    window: int | None
    position: PositionConfig | None

    def slots(self, length: int) -> int:
        """Returns S of its cache for `length` tokens per row: see `slots_for`."""
        # A rope that asks for the sequence's length reads it off the cache.
        ring = not (isinstance(self.position, Rope) and self.position.asks_length)
        return slots_for(length, self.window if ring else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(StackFacts):
    """A stack of L Transformer layers.

    Attributes:
      layers: L, the number of layers.
      width: D, the model width.
      attention: the attention of every layer.
      mlp: the feed-forward part of every layer.
      norm: the norm of both branches.
      init: distribution of the initial weights.
      windows: how far back each layer sees, in tokens, tiled over the layers; a key at
        distance <= window is visible. None: the full sequence.
      positions: position encoding of each layer, tiled over the layers, with None for a
        layer without one (NoPE). None instead of a tuple: all layers use
        `attention.position`.
      norms: place of a branch's norm: "before" the branch; "after" it, before the
        residual sum (OLMo-2); "both" (Gemma 2).
      parallel_residual: compute x + attention(norm x) + mlp(norm' x), as in GPT-NeoX;
        otherwise the MLP reads the attention's output.
      residual_scale: factor of both branches' outputs: "one", or "inverse_sqrt_depth"
        for 1/sqrt(L).
      remat: what the backward pass recomputes: "nothing"; "dots", everything but matrix
        products with weights; "block", everything inside a block.
      unroll: layer patterns per iteration of the scan over layers. Larger values
        compile for longer and may train faster. Decoding on CPUs and GPUs ignores it.
    """

    layers: PositiveInt
    width: PositiveInt
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig = field(default_factory=NormConfig)
    init: InitConfig = field(default_factory=InitConfig)
    windows: tuple[NonNegativeInt | None, ...] = (None,)
    positions: tuple[Rope | Alibi | None, ...] | None = None
    norms: Literal["before", "after", "both"] = "before"
    parallel_residual: bool = False
    residual_scale: Literal["one", "inverse_sqrt_depth"] = "one"
    remat: Remat = "nothing"
    unroll: PositiveInt = 1

    def __post_init__(self):
        check_ranges(self)
        for name in ("windows", "positions"):
            value = getattr(self, name)
            if value is not None and not 1 <= len(value) <= self.layers:
                raise ValueError(
                    f"TransformerConfig: {name} must have 1 to layers={self.layers} "
                    f"entries, got {value}"
                )
        if self.positions is not None:
            if isinstance(self.attention.position, LearnedPositions):
                raise ValueError(
                    "TransformerConfig: positions sets each layer's rope or ALiBi, "
                    "and attention.position is learned: use one of the two"
                )
            for position in self.positions:
                # The attention's own checks, of every layer.
                replace(self.attention, position=position)

    @property
    def pattern(self) -> tuple[LayerKind, ...]:
        """The properties that differ by layer: P entries, tiled over the layers."""
        positions = self.positions or (self.attention.position,)
        length = min(math.lcm(len(self.windows), len(positions)), self.layers)
        return tuple(
            LayerKind(
                self.windows[place % len(self.windows)],
                positions[place % len(positions)],
            )
            for place in range(length)
        )

    @property
    def stacked(self) -> list[range]:
        """The layers that each module of the stack's `blocks` holds."""
        return stacked_layers(self.layers, len(self.pattern))

    def place_of(self, layer: int) -> tuple[int, int]:
        """Returns the module of the stack's `blocks` and the entry that a layer is."""
        return next(
            (block, numbers.index(layer))
            for block, numbers in enumerate(self.stacked)
            if layer in numbers
        )

    def kind_of(self, layer: int) -> LayerKind:
        """Returns what a layer has of its own."""
        return self.pattern[layer % len(self.pattern)]

    def block_maps(self, place: int) -> Maps:
        """Returns the sizes (N, M) of the linear maps of a place's layers, by name."""
        del place  # All layers have the same ones.
        return self.attention.maps(self.width) | self.mlp.maps(self.width)

    def attention_of(self, kind: LayerKind) -> AttentionConfig:
        """Returns the attention of a layer of this kind."""
        return replace(self.attention, position=kind.position)

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None: no limit."""
        return longest_sequence(self.attention.position)

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs per token at length T, without embedding and head.

        6 a weight of every matrix product, and 12 H E min(window + 1, T) a layer for
        attention (forward and backward; the causal half is not discounted). Source: the
        convention of Chowdhery et al. 2022, appendix B, with windows.
        """
        a = self.attention
        weights = sum(n * m for n, m in self.block_maps(0).values())
        # A window of w sees w tokens back and itself.
        windows = (self.kind_of(layer).window for layer in range(self.layers))
        seen = sum(length if w is None else min(w + 1, length) for w in windows)
        matrices = 6.0 * self.layers * weights
        return matrices + 12.0 * a.heads * a.head_width * seen
