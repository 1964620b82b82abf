"""RMSNorm and LayerNorm."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.ranges import NonNegativeFloat, check_ranges
from recurjax.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """A normalization over the last axis.

    Attributes:
      kind: "rms" (Zhang and Sennrich 2019) or "layer" (Ba et al. 2016).
      eps: added to the mean square or to the variance.
      scale: learn a scale.
      bias: learn a bias.
      one_plus: multiply by 1 + scale, with a scale that starts at 0 (Gemma).
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: NonNegativeFloat = 1e-6
    scale: bool = True
    bias: bool = False
    one_plus: bool = False

    def __post_init__(self):
        check_ranges(self)
        if self.one_plus and not self.scale:
            raise ValueError("NormConfig: one_plus needs scale=True")


def rms_norm(x: Float[Array, "... D"], *, eps: float) -> Float[Array, "... D"]:
    """Computes x / sqrt(mean(x^2) + eps), in at least float32; keeps that dtype."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def layer_norm(x: Float[Array, "... D"], *, eps: float) -> Float[Array, "... D"]:
    """Computes (x - mean) / sqrt(var + eps), in at least float32; keeps that dtype."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps)


class Norm(nnx.Module):
    """A normalization with scale and bias; multiplied in float32, then cast."""

    def __init__(self, config: NormConfig, width: int):
        self.config = config
        # Either way the norm multiplies by 1 at the start.
        start = jnp.zeros if config.one_plus else jnp.ones
        self.scale = nnx.Param(start(width, jnp.float32)) if config.scale else None
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32)) if config.bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        # The scale is applied in float32 too; only the result is rounded to x's dtype.
        normalise = rms_norm if self.config.kind == "rms" else layer_norm
        y = normalise(x, eps=self.config.eps)
        if self.scale is not None:
            scale = _for_axes_of(y, self.scale[...])
            y = y * (1 + scale if self.config.one_plus else scale)
        if self.bias is not None:
            y = y + _for_axes_of(y, self.bias[...])
        return y.astype(x.dtype)


def _for_axes_of(x: Array, vector: Array) -> Array:
    """Returns a vector [D], or one of each token's own, for x by token or by head."""
    tokens, between = vector.shape[:-1], x.ndim - vector.ndim
    return vector.reshape(*tokens, *(1,) * between, -1) if tokens else vector
