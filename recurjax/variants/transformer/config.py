"""What a Transformer stack can be, and what it costs."""

from dataclasses import dataclass, field
from typing import Literal

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import longest_sequence
from recurjax.layers.stack import Remat, StackFacts
from recurjax.ranges import NonNegativeInt, PositiveInt, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(StackFacts):
    """A stack of L Transformer layers.

    Attributes:
      layers: L.
      width: D.
      attention, mlp, norm, init: the layers' own configs.
      windows: how far back each layer sees, None for all; tiled over the layers, so
        its length divides L. A key at distance <= window is visible.
      parallel_residual: x + attention(norm x) + mlp(norm' x), as in GPT-NeoX; otherwise
        the MLP reads what the attention wrote.
      residual_scale: multiplies what both branches write: "one", or
        "inverse_sqrt_depth", 1/sqrt(L).
      remat: what the backward pass computes again: "nothing"; "dots", all but the
        outputs of matrix products with weights; "block", everything inside a block.
      unroll: repeats of the window pattern in one turn of the scan over layers. More
        compile for longer; whether a training step gains has to be measured. Decoding
        takes no notice on a CPU, where the host runs the layers, nor on a GPU.
    """

    layers: PositiveInt
    width: PositiveInt
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig = field(default_factory=NormConfig)
    init: InitConfig = field(default_factory=InitConfig)
    windows: tuple[NonNegativeInt | None, ...] = (None,)
    parallel_residual: bool = False
    residual_scale: Literal["one", "inverse_sqrt_depth"] = "one"
    remat: Remat = "nothing"
    unroll: PositiveInt = 1

    def __post_init__(self):
        check_ranges(self)
        # Layers of one place in the pattern are stacked, so all places need as many.
        if not self.windows or self.layers % len(self.windows):
            raise ValueError(
                f"TransformerConfig: the length of windows must divide layers="
                f"{self.layers}, got {self.windows}"
            )

    @property
    def max_length(self) -> int | None:
        """The most tokens that a sequence can have; None: no limit."""
        return longest_sequence(self.attention.position)

    def flops_per_token(self, length: int) -> float:
        """Counts training FLOPs a token at sequence length T, embedding and head aside.

        6 a weight of every matrix product, and 12 H E min(window + 1, T) a layer for
        attention (forward and backward; the causal half is not discounted). Source: the
        convention of Chowdhery et al. 2022, appendix B, with windows.
        """
        a, D = self.attention, self.width
        # Query and output projections have H heads, keys and values K.
        projections = D * a.head_width * (2 * a.heads + 2 * a.key_heads)
        mlp = D * self.mlp.width * (3 if self.mlp.gated else 2)
        # Each window of the pattern comes `repeats` times.
        # A window of w sees w tokens back and itself.
        repeats = self.layers // len(self.windows)
        seen = repeats * sum(
            length if w is None else min(w + 1, length) for w in self.windows
        )
        matrices = 6.0 * self.layers * (projections + mlp)
        return matrices + 12.0 * a.heads * a.head_width * seen
