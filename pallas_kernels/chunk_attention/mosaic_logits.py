"""A block of logits inside the TPU kernels, [ends, rows]: ends lie along sublanes.

So sums and maxima over ends run down the registers, and the numbers that each position
has lie along lanes, one register for 1024 of them.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_attention.arrays import Array
from pallas_kernels.chunk_attention.mosaic_launch import HIDDEN, Call, dot
from pallas_kernels.chunk_attention.visibility import sees


def hidden_logits(call: Call, k: Array, q: Array, first, i, j, documents) -> Array:
    """Returns scale k q^T [ends, rows], HIDDEN where a position does not see an end.

    Args:
      i, j: which blocks of positions and of ends these are.
      documents: of positions [1, rows] and of ends [ends, 1], or nothing.
    """
    logits = call.scale * dot(k, q, (1, 1))
    s = j * call.tiles.block_k + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    t = i * call.tiles.block_q + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    seen = sees(first, t, s, chunk=call.chunk)
    if call.ends % call.tiles.block_k:
        seen = seen & (s < call.ends)
    if documents:
        rows_ref, ends_ref = documents
        seen = seen & (rows_ref[...] == ends_ref[...])
    return jnp.where(seen, logits, HIDDEN)


def real_ends(call: Call, x: Array, j) -> Array:
    """Returns a block of ends with zeros where the last one overruns the array."""
    if call.ends % call.tiles.block_k == 0:
        return x
    s = j * call.tiles.block_k + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(s < call.ends, x, jnp.zeros_like(x))


def real_rows(call: Call, x: Array, i, axis: int) -> Array:
    """Returns a block of positions with zeros where the last one overruns the array."""
    if call.length % call.tiles.block_q == 0:
        return x
    t = i * call.tiles.block_q + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(t < call.length, x, jnp.zeros_like(x))
