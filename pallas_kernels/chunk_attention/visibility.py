"""The chunk ends that a block of positions sees, by index arithmetic alone.

Position t sees end s when s < first + t // C. Functions take Python integers and
traced ones alike; they serve the kernels of both accelerators.
"""

import jax
import jax.numpy as jnp


def seen_ends(first, t, *, chunk: int, ends: int):
    """Returns how many ends position t sees; it sees none after them."""
    return jnp.minimum(first + t // chunk, ends)


def first_position(first, s, *, chunk: int):
    """Returns the first position that sees end s (0 if all do)."""
    return jnp.maximum(0, (s - first + 1) * chunk)


def sees(first, t: jax.Array, s: jax.Array, *, chunk: int) -> jax.Array:
    """Returns whether t sees s, for each pair that the shapes broadcast to."""
    return (s - first + 1) * chunk <= t  # No division for each pair.


def cdiv(a, b: int):
    """Returns a / b, rounded up."""
    return (a + b - 1) // b
