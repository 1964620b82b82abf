"""The paper's equations, and how positions and states are moved about.

Positions are counted from 0; a set of positions is a slice with a stride, or an array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from recurjax.types import Array

Positions = slice | np.ndarray
"""A set of positions: `slice(s, None, S)`, or a sorted array of distinct ones."""


EPS = float(np.finfo(np.float32).eps)
"""float32's machine epsilon, whatever x is: what torch's rms_norm takes for bfloat16.

bfloat16's own, 2^-7, is as large as the mean square of small activations."""


def rms(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Computes x / sqrt(mean(x^2) + eps), eps = 1.2e-7 in every dtype.

    In at least float32, then cast back. Source: nanochat's parameter-free RMSNorm.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + EPS)).astype(x.dtype)


class Memory(NamedTuple):
    """What enters the blocks at some positions.

    Attributes:
      state: m, [B, n, D].
      keys: W_k m of the shared projection, or None.
      values: W_v m of the shared projection, or None.
    """

    state: Float[Array, "B n D"]
    keys: Float[Array, "B n K E"] | None = None
    values: Float[Array, "B n K E"] | None = None


def mixed(
    local: Float[Array, "B n K E"],
    recurrent: Float[Array, "B n K E"] | None,
    gates: Float[Array, "B n 2 K"],
    *,
    replaces: Bool[Array, ""],
) -> Float[Array, "B n K E"]:
    """Computes g_local * local + g_rec * recurrent, eq. (4).

    Args:
      recurrent: None for a memory of zero.
      gates: 2 sigmoid(W_g a), eq. (3): local, then recurrent.
      replaces: leave the local part out.
    """
    kept = jnp.where(replaces, 0, gates[:, :, 0])[..., None] * local
    if recurrent is None:
        return kept
    return kept + gates[:, :, 1][..., None] * recurrent


def take(x: Array, positions: Positions) -> Array:
    """Returns x[:, positions]."""
    return x[:, positions]


def put(x: Array, positions: Positions, new: Array) -> Array:
    """Returns x with x[:, positions] = new.

    A stride is written without a scatter: each new row repeated, chosen by a mask.
    """
    if isinstance(positions, np.ndarray):
        return x.at[:, positions].set(new)
    start, stop, stride = positions.indices(x.shape[1])
    if stride == 1:
        return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=1)
    T, n = x.shape[1], new.shape[1]
    spread = jnp.repeat(new, stride, axis=1, total_repeat_length=n * stride)
    after = max(T - start - n * stride, 0)
    room = jnp.pad(spread, [(0, 0), (start, after)] + [(0, 0)] * (x.ndim - 2))[:, :T]
    index = np.arange(T)
    chosen = (index >= start) & (index < stop) & ((index - start) % stride == 0)
    return jnp.where(chosen.reshape(1, T, *[1] * (x.ndim - 2)), room, x)


def indices(positions: Positions, length: int) -> np.ndarray:
    """Returns a set of positions as an array."""
    if isinstance(positions, np.ndarray):
        return positions
    return np.arange(length)[positions]


def strided_partition(length: int, parts: int) -> tuple[slice, ...]:
    """Cuts positions into S subsets s, s + S, s + 2 S, ...: section 3.1.

    Raises:
      ValueError: S is not in 1..T.
    """
    if not 1 <= parts <= length:
        raise ValueError(
            f"strided_partition: parts must lie in 1..{length}, the sequence's length, "
            f"got {parts}"
        )
    return tuple(slice(start, None, parts) for start in range(parts))
