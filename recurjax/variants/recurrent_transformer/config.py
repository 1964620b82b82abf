"""The config of the Recurrent Transformer, and its FLOPs."""

from dataclasses import dataclass, field
from typing import Literal

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import (
    Alibi,
    PositionConfig,
    Rope,
    longest_sequence,
    rotary_width,
)
from recurjax.layers.stack import StackFacts
from recurjax.ranges import PositiveInt, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSwitches:
    """The parts of a layer other than its norms and MLP; the defaults are the paper's.

    Attributes:
      heads: H, the number of query heads.
      key_heads: K, the number of key and value heads, a divisor of H.
      head_width: E, the width of a head.
      position: position encoding; None: none. Learned positions are added to the
        stack's input.
      qk_norm: norm of queries and keys over all heads together; None: none.
      qkv_bias: add biases to the query, key and value projections.
      out_bias: add a bias to the output projection.
      residual_scale: factor of both branches' outputs: "inverse_sqrt_depth" for
        1/sqrt(L) (the paper), or "one" (the authors' code).
      normed_persistent: project the persistent keys and values from norm(z); off: from
        z itself, the paper's ablation.
      block: block size c: keys and values are temporary within a block of c positions
        and persistent across blocks. 1 is the paper's layer; the sequence length gives
        a Transformer.
    """

    heads: PositiveInt
    key_heads: PositiveInt
    head_width: PositiveInt
    position: PositionConfig | None = field(default_factory=Alibi)
    qk_norm: NormConfig | None = field(default_factory=NormConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    residual_scale: Literal["inverse_sqrt_depth", "one"] = "inverse_sqrt_depth"
    normed_persistent: bool = True
    block: PositiveInt = 1

    def __post_init__(self):
        check_ranges(self)
        kind = type(self).__name__
        if self.heads % self.key_heads:
            raise ValueError(
                f"{kind}: key_heads must divide heads, got {self.key_heads} and "
                f"{self.heads}"
            )
        # Raises where the rotated width would be odd, now and not in the first step.
        if isinstance(self.position, Rope):
            rotary_width(self.head_width, self.position)
            if self.position.scaling is not None:
                raise ValueError(
                    f"{kind}: position.scaling must be None, which is all that the "
                    f"op's rope supports, got {type(self.position.scaling).__name__}"
                )

    def maps(self, width: int) -> dict[str, tuple[int, int]]:
        """Returns the sizes (N, M) of its projections, by name."""
        return AttentionConfig(
            heads=self.heads,
            key_heads=self.key_heads,
            head_width=self.head_width,
            position=None,
        ).maps(width)

    def weights(self, width: int) -> int:
        """Counts the weights of its products.

        Queries and output H E each; keys and values K E each, projected from x and from
        z.
        """
        return width * self.head_width * (2 * self.heads + 4 * self.key_heads)

    def seen(self, length: int) -> int:
        """Counts the keys of a position, at most, in a sequence of T."""
        return length


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentTransformerConfig(LayerSwitches, StackFacts):
    """A stack of L Recurrent Transformer layers; the defaults are the paper's.

    Attributes:
      layers: L, the number of layers.
      width: D, the model width.
      mlp: the feed-forward part of every layer.
      norm: norm before both branches; None: none, the theory's norm-free layer.
      init: distribution of the initial weights.
      schedule: order of the computation, which changes the result by rounding only:
        "naive", "prefix" or "wavefront", as in `recurrent_prefill`; None: the fastest
        expected.
      tile: positions per tile of the tiled schedules, a multiple of `block`; None: the
        size that measured fastest.
    """

    layers: PositiveInt
    width: PositiveInt
    mlp: MlpConfig
    norm: NormConfig | None = field(default_factory=NormConfig)
    init: InitConfig = field(default_factory=InitConfig)
    schedule: Literal["naive", "prefix", "wavefront"] | None = None
    tile: PositiveInt | None = None

    def __post_init__(self):
        LayerSwitches.__post_init__(self)
        # A tile reads the prefix once: a block must not straddle two of them.
        if self.tile is not None and self.tile % self.block:
            raise ValueError(
                "RecurrentTransformerConfig: tile must be a multiple of block="
                f"{self.block}, got {self.tile}"
            )
        if self.tile is not None and self.schedule == "naive":
            raise ValueError(
                "RecurrentTransformerConfig: tile must be None with the naive "
                f"schedule, got {self.tile}"
            )

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None: no limit."""
        return longest_sequence(self.position)

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs per token at length T, without embedding and head.

        6 a weight of every matrix product, keys and values projected twice (from x and
        from z), and 12 H E T a layer for attention, as for the Transformer.
        """
        D, E = self.width, self.head_width
        mlp = self.mlp.weights(D)
        return self.layers * (
            6.0 * (self.weights(D) + mlp) + 12.0 * self.heads * E * length
        )


def shipped_config(
    *, layers: int, width: int, heads: int
) -> RecurrentTransformerConfig:
    """Returns the configuration that the authors' code ships.

    Departs from the paper: LayerNorm for RMSNorm, no 1/sqrt(L) on the branches; depth
    enters by the output projections' init instead.
    """
    norm = NormConfig(kind="layer", eps=1e-5)
    return RecurrentTransformerConfig(
        layers=layers,
        width=width,
        heads=heads,
        key_heads=heads,
        head_width=width // heads,
        mlp=MlpConfig(kind="gelu", width=4 * width),
        norm=norm,
        qk_norm=norm,
        residual_scale="one",
        init=InitConfig(std=None, truncate=3.0, output="layer", embedding_std=None),
    )
