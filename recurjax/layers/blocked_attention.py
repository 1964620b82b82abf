"""Causal attention in blocks, so that memory grows with T and not with T squared."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from recurjax.types import Array


def attend_in_blocks(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "B T H E"]:
    """Computes o[t] = softmax(scale q[t] k[s]) v[s] over s <= t, t - s <= window.

    Attention over all tokens is chunk attention with chunks of one: every earlier token
    is a chunk's end, and the token itself the own term. So it has that op's kernels,
    skips what is hidden, and keeps inputs, o and log normalizers for the gradient.
    """
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    if window is not None and window < q.shape[1]:
        return _attend_in_window(q, k, v, scale, window)
    own = jnp.sum(q.astype(jnp.promote_types(q.dtype, jnp.float32)) * k, axis=-1)
    ends = ChunkEnds(keys=k.swapaxes(1, 2), values=v.swapaxes(1, 2))
    return chunk_attention(q, own, v, ends, chunk=1, scale=scale)


def _attend_in_window(q, k, v, scale: float, window: int) -> Array:
    """Attends block by block: one of W tokens sees itself and the one before."""
    B, T, H, E = q.shape
    size = max(window, 1)
    padding = ((0, 0), (0, -T % size), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, padding).reshape(B, -1, size, H, E) for x in (q, k, v))
    k, v = (
        jnp.concatenate([jnp.pad(x[:, :-1], ((0, 0), (1, 0), *[(0, 0)] * 3)), x], 2)
        for x in (k, v)
    )
    # A block's keys begin `size` tokens before its queries.
    distance = size + jnp.arange(size)[:, None] - jnp.arange(2 * size)
    near = (distance >= 0) & (distance <= window)

    @jax.checkpoint
    def block(part):
        q, k, v, first = part
        there = first + jnp.arange(2 * size) >= size  # The first block has none before.
        return _attend_masked(q, k, v, scale, near & there)

    first = jnp.arange(q.shape[1]) * size
    o = jax.lax.map(block, (*(x.swapaxes(0, 1) for x in (q, k, v)), first))
    return o.swapaxes(0, 1).reshape(B, -1, H, E)[:, :T]


def _attend_masked(q, k, v, scale: float, mask: Array) -> Array:
    if q.dtype != jnp.float64:
        return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None], scale=scale)
    # Whose softmax is float32 for float64 inputs too.
    logits = jnp.where(mask, scale * jnp.einsum("bthe,bshe->bhts", q, k), -jnp.inf)
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(logits, axis=-1), v)
