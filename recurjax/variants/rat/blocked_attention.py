"""Causal attention in blocks, so that memory grows with T and not with T squared."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from recurjax.layers.attention import attend, visible_by_position
from recurjax.types import Array


def attend_in_blocks(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T H E"],
    v: Float[Array, "B T H E"],
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "B T H E"]:
    """Computes o[t] = softmax(scale q[t] k[s]) v[s] over s <= t, t - s <= window.

    Attention over all tokens is chunk attention with chunks of one: every earlier token
    is a chunk's end, and the token itself the own term.
    """
    if window is not None:
        return _attend_in_window(q, k, v, scale, window)
    own = jnp.sum(q.astype(jnp.promote_types(q.dtype, jnp.float32)) * k, axis=-1)
    ends = ChunkEnds(keys=k.swapaxes(1, 2), values=v.swapaxes(1, 2))
    return chunk_attention(q, own, v, ends, chunk=1, scale=scale)


def _attend_in_window(q, k, v, scale: float, window: int) -> Array:
    """Attends block by block: one of W tokens sees itself and the one before."""
    B, T, H, E = q.shape
    size = min(max(window, 1), T)
    padding = ((0, 0), (0, -T % size), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, padding).reshape(B, -1, size, H, E) for x in (q, k, v))
    k, v = (
        jnp.concatenate([jnp.pad(x[:, :-1], ((0, 0), (1, 0), *[(0, 0)] * 3)), x], 2)
        for x in (k, v)
    )
    first = jnp.arange(q.shape[1]) * size

    @jax.checkpoint
    def block(part):
        q, k, v, first = part
        positions = first + jnp.arange(size)[None]
        keys = first - size + jnp.arange(2 * size)[None]
        mask = visible_by_position(positions, keys, window=window)
        return attend(q, k, v, scale=scale, causal=False, mask=mask)

    blocks = (*(x.swapaxes(0, 1) for x in (q, k, v)), first)
    o = jax.lax.map(block, blocks)
    return o.swapaxes(0, 1).reshape(B, -1, H, E)[:, :T]
