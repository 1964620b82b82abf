"""ALiBi for kernels without biases, as extra channels of queries and keys.

Softmax does not change when a number is added to all logits of a query, so in causal
attention -slope (t - s) may as well be slope s: a product of a number of the head with
one of the key, which a dot product of wider heads adds to q k by itself.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from recurjax.types import Array

CHANNELS = 8
"""How many more channels there are: six that count, up to a multiple of eight."""

_LOW = 256
_LONGEST = _LOW * _LOW
_PARTS = 3


def refusal(length: int, dtype) -> str | None:
    """Returns why channels cannot carry the bias, or None when they can."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        # Between numbers as large as slope T, q k would lose bits that it has there.
        return f"ALiBi by channels is for bfloat16 and float16, got {dtype}"
    if length > _LONGEST:
        return f"ALiBi by channels counts to {_LONGEST} tokens, got {length}"
    return None


def with_alibi_channels(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    slopes: np.ndarray,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H W"], Float[Array, "B T K W"]]:
    """Returns q and k with scale q' k' = scale q k + slope_h s.

    A position is the sum of a multiple of 256 and a number below it, both exact in
    bfloat16; a slope is the sum of three numbers of it, which is float32's precision.
    Their products are summed with the others in float32.

    Args:
      slopes: H numbers, float64.
      scale: what the kernel multiplies logits by.
    """
    B, T, H, _ = q.shape
    positions = np.arange(T)
    low = positions % _LOW
    # Each part of the position meets each part of the slope.
    by_key = np.repeat(np.stack([positions - low, low], axis=1), _PARTS, axis=1)
    by_head = np.tile(_split(slopes / scale, q.dtype), (1, 2))  # [H, 6]
    spare = ((0, 0), (0, CHANNELS - 2 * _PARTS))
    for_q = jnp.asarray(np.pad(by_head, spare), q.dtype)
    for_k = jnp.asarray(np.pad(by_key, spare), k.dtype)[:, None]
    return (
        jnp.concatenate([q, jnp.broadcast_to(for_q, (B, T, H, CHANNELS))], -1),
        jnp.concatenate(
            [k, jnp.broadcast_to(for_k, (*k.shape[:3], CHANNELS))], axis=-1
        ),
    )


def _split(numbers: np.ndarray, dtype) -> np.ndarray:
    """Returns numbers of the dtype whose sum is each of `numbers`, largest first."""
    parts, rest = [], np.asarray(numbers, np.float64)
    for _ in range(_PARTS):
        part = rest.astype(dtype).astype(np.float64)
        parts.append(part)
        rest = rest - part
    return np.stack(parts, axis=1)
