"""What one Recurrent Transformer layer computes: the static half of the op's input."""

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "layer", "none"]
Activation = Literal["gelu", "gelu_tanh", "relu_squared", "silu"]
Dtype = Literal["float32", "bfloat16", "float64"]
Schedule = Literal["naive", "tiled", "prefix", "wavefront"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """Every switch of the layer; scales and biases are there when their weights are.

    Attributes:
      heads: H.
      key_heads: K, a divisor of H; query head h reads key head h // (H / K).
      head_width: E.
      norm, norm_eps: of both pre-norms, over D.
      qk_norm, qk_norm_eps: of queries and keys over all heads together, H E and K E.
      normed_persistent: whether the persistent pair is projected from norm(z), as in
        the paper, or from z itself (the paper's ablation).
      alibi_max_bias: m in slope_h = 2^(-m (h + 1) / H); None: no ALiBi.
      rope_base, rope_width: of the rotary embedding in half-split order, and how many
        of the E dimensions it rotates; None: no RoPE.
      logit_scale: multiplies q k^T (on top of qk-norm).
      residual_scale: multiplies what both branches write.
      activation: of the MLP; on the gate when the weights have one (SwiGLU is "silu"
        with a gate).
      block: c of the blocked recurrence: position i sees the temporary pairs of its own
        block of c positions (block i // c) and the persistent pairs of all earlier
        blocks. 1 is the Recurrent Transformer.
      dtype: of matrix operands, keys and values. The residual stream, softmax and all
        accumulators are at least float32.
    """

    heads: int
    key_heads: int
    head_width: int
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    qk_norm: NormKind = "rms"
    qk_norm_eps: float = 1e-6
    normed_persistent: bool = True
    alibi_max_bias: float | None = None
    rope_base: float | None = None
    rope_width: int = 0
    logit_scale: float
    residual_scale: float
    activation: Activation = "gelu"
    block: int = 1
    dtype: Dtype = "float32"

    def __post_init__(self):
        for name in ("heads", "key_heads", "head_width", "block"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"LayerSpec: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.heads % self.key_heads:
            raise ValueError(
                f"LayerSpec: key_heads must divide heads={self.heads}, got "
                f"{self.key_heads}"
            )
        if self.rope_base is not None and not (
            0 < self.rope_width <= self.head_width and self.rope_width % 2 == 0
        ):
            raise ValueError(
                f"LayerSpec: rope_width must be even and at most head_width="
                f"{self.head_width}, got {self.rope_width}"
            )
