"""Causal attention in blocks, so that memory grows with T and not with T squared."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from recurjax.layers.heads import keys_for_queries
from recurjax.types import Array

_QUERIES = 256
"""The least number of queries of a block, where the window is no smaller."""


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
    k, v = (keys_for_queries(x, q.shape[2]) for x in (k, v))
    if window is not None and window < q.shape[1]:
        return _attend_in_window(q, k, v, scale, window)
    own = jnp.sum(q.astype(jnp.promote_types(q.dtype, jnp.float32)) * k, axis=-1)
    ends = ChunkEnds(keys=k.swapaxes(1, 2), values=v.swapaxes(1, 2))
    return chunk_attention(q, own, v, ends, chunk=1, scale=scale)


def _attend_in_window(q, k, v, scale: float, window: int) -> Array:
    """Attends block by block: one of `size` queries sees its own keys and W before.

    Small blocks waste little on keys outside the window, and each key is copied once
    for every block that sees it: a quarter of the window, and no less than 256, is the
    fastest measured on CPU.
    """
    B, T, H, E = q.shape
    size = max(1, min(window, max(_QUERIES, -(-window // 4))))
    before = -(-window // size)
    blocks = -(-T // size)

    def fold(x):
        x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
        return x.reshape(B, blocks, size, H, E).transpose(1, 0, 3, 2, 4)

    def with_past(x):
        x = jnp.pad(fold(x), ((before, 0), *[(0, 0)] * 4))
        return jnp.concatenate([x[i : i + blocks] for i in range(before + 1)], axis=3)

    # A block's keys begin `before` blocks before its queries.
    S = (before + 1) * size
    distance = before * size + jnp.arange(size)[:, None] - jnp.arange(S)
    near = (distance >= 0) & (distance <= window)

    @jax.checkpoint
    def block(part):
        q, k, v, number = part
        there = (
            number * size + jnp.arange(S) >= before * size
        )  # Nothing before token 0.
        return _attend_masked(q, k, v, scale, near & there)

    o = jax.lax.map(block, (fold(q), with_past(k), with_past(v), jnp.arange(blocks)))
    return o.transpose(1, 0, 3, 2, 4).reshape(B, -1, H, E)[:, :T]


def _attend_masked(q, k, v, scale: float, mask: Array) -> Array:
    """Attends within a block, [B, H, t, E]; every query sees itself at least."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    logits = jnp.where(mask, scale * product("bhte,bhse->bhts", q, k), -jnp.inf)
    highest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - highest)
    o = product("bhts,bhse->bhte", weights.astype(v.dtype), v)
    return (o / weights.sum(axis=-1, keepdims=True)).astype(q.dtype)
