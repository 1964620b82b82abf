"""Maxima, softmax and log-sum-exp of logits.

XLA for CPUs takes a maximum one number at a time. The maximum of two halves uses
vectors, so there the maximum is folded in halves until few numbers are left, which
makes attention's forward pass at T 4096 1.25x faster (docs/benchmarks.md). On other
devices these functions are jax's own.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import target

Array = jax.Array
_LANES = 16
"""Numbers of a vector, of float32 in AVX-512."""


def largest(
    x: Float[Array, "..."], axis: int = -1, *, initial: float | None = None
) -> Float[Array, "..."]:
    """Returns the maxima along an axis.

    Args:
      initial: the least maximum, also where the axis is empty.
    """
    if target.reduces_one_by_one():
        while (size := x.shape[axis]) > _LANES:
            # The halves of an odd size share a number, which a maximum may.
            half = -(-size // 2)
            first = jax.lax.slice_in_dim(x, 0, half, axis=axis)
            x = jnp.maximum(
                first, jax.lax.slice_in_dim(x, size - half, size, axis=axis)
            )
    return jnp.max(x, axis=axis, initial=initial)


def softmax(logits: Float[Array, "... S"]) -> Float[Array, "... S"]:
    """Returns exp(logits) over their sum along the last axis."""
    if not target.reduces_one_by_one():
        return jax.nn.softmax(logits, axis=-1)
    return _softmax(logits)


def logsumexp(
    logits: Float[Array, "... V"], *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Returns log sum exp of the last axis."""
    if not target.reduces_one_by_one():
        return jax.nn.logsumexp(logits, axis=-1, keepdims=keepdims)
    peak = jax.lax.stop_gradient(largest(logits))[..., None]
    # Of infinities the difference would be NaN.
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    sums = peak + jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    return sums if keepdims else sums[..., 0]


@jax.custom_jvp
def _softmax(logits: Array) -> Array:
    p = jnp.exp(logits - largest(logits)[..., None])
    return p / jnp.sum(p, axis=-1, keepdims=True)


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    (logits,), (dlogits,) = primals, tangents
    p = _softmax(logits)
    return p, p * (dlogits - jnp.sum(p * dlogits, axis=-1, keepdims=True))
