"""Attention of one new token to a layer's cache, by a C++ kernel.

It reads the slots that a query sees, in place: XLA for CPUs first copies the layer out
of its stack, and reads every slot, also those that hold nothing yet.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import cpu


def serves(dtype: Any) -> bool:
    """Returns whether the kernel reads a cache of this dtype."""
    known = dtype in (jnp.float32, jnp.bfloat16)
    return known and cpu.serves()


def attend(
    q: Float[Array, "B H E"],
    keys: Float[Array, "L B S K E"],
    values: Float[Array, "L B S K E"],
    layer: Int[Array, ""],
    newest: Int[Array, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "B H E"]:
    """Attends to a ring buffer in float32, which the result is.

    Args:
      layer: which layer's keys and values.
      newest: the newest position that each row holds, that of its query; -1: none, and
        the row's result is zero. Slot s holds the largest position p up to it with p
        mod S = s.
      window: how far back a query sees; None: to the oldest slot.
    """
    like = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    reach = keys.shape[2] if window is None else window
    return cpu.call(
        "cache_read",
        like,
        q.astype(jnp.float32),
        keys,
        values,
        layer.astype(jnp.int32),
        newest.astype(jnp.int32),
        vmap_method="sequential",
        scale=float(scale),
        window=reach,
    )
