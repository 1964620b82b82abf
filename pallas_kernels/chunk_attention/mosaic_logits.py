"""A block of logits inside the TPU kernels, [ends, rows]: ends lie along sublanes.

So sums and maxima over ends run down the registers, and the numbers that each position
has lie along lanes, one register for 1024 of them.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_attention.call import Array
from pallas_kernels.chunk_attention.mosaic_launch import HIDDEN, Launch, dot
from pallas_kernels.chunk_attention.visibility import sees


def hidden_logits(launch: Launch, k: Array, q: Array, first, i, j, documents) -> Array:
    """Returns scale k q^T [ends, rows], HIDDEN where a position does not see an end.

    Args:
      i, j: which blocks of positions and of ends these are.
      documents: documents of positions [1, rows] and of ends [ends, 1]; empty: none.
    """
    logits = launch.scale * dot(k, q, (1, 1))
    s = j * launch.tiles.block_k + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    t = i * launch.tiles.block_q + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    seen = sees(first, t, s, chunk=launch.chunk)
    if launch.ends % launch.tiles.block_k:
        seen = seen & (s < launch.ends)
    if documents:
        rows_ref, ends_ref = documents
        seen = seen & (rows_ref[...] == ends_ref[...])
    return jnp.where(seen, logits, HIDDEN)


def real_ends(launch: Launch, x: Array, j) -> Array:
    """Returns a block of ends with zeros where the last one overruns the array."""
    if launch.ends % launch.tiles.block_k == 0:
        return x
    s = j * launch.tiles.block_k + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(s < launch.ends, x, jnp.zeros_like(x))


def real_rows(launch: Launch, x: Array, i, axis: int) -> Array:
    """Returns a block of positions with zeros where the last one overruns the array."""
    if launch.length % launch.tiles.block_q == 0:
        return x
    t = i * launch.tiles.block_q + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(t < launch.length, x, jnp.zeros_like(x))
