"""Causal attention in blocks, so that memory grows with T and not with T squared."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pallas_kernels import reductions, target
from pallas_kernels.chunk_attention import ChunkEnds, chunk_attention
from recurjax.layers.attention.bands import attend_in_bands
from recurjax.layers.attention.heads import keys_for_queries
from recurjax.types import Array

_TILES_ON_CPU = 4096
"""From this many tokens on, our kernels' tiles in plain XLA are faster than bands on a
CPU. CPU time of one thread, 4 heads of 64: at T 8192 687 ms instead of 929, both passes
3,149 instead of 4,094. At T 2048 bands win the forward pass (199 ms against 235) and
lose both passes together (1,085 against 899)."""

_QUERIES = 256
"""The least number of queries of a block, where the window is no smaller."""


def attend_in_blocks(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    *,
    scale: float,
    window: int | None = None,
    segments: Int[Array, "B T"] | None = None,
    slopes: np.ndarray | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T H E"]:
    """Computes causal attention as `attend` does, in memory of B H T.

    By our own kernels where they say the same; else by plain XLA, in bands.
    """
    plain = window is None and slopes is None and soft_cap is None
    if plain and runs_as_chunks_of_one(q.shape[1]):
        return attend_as_chunks_of_one(q, k, v, scale=scale, segments=segments)
    return attend_in_bands(
        q,
        k,
        v,
        scale=scale,
        window=window,
        segments=segments,
        slopes=slopes,
        soft_cap=soft_cap,
    )


def runs_as_chunks_of_one(length: int) -> bool:
    """Whether `attend_in_blocks` hands plain attention of T tokens to our kernels."""
    return length >= _TILES_ON_CPU or not target.computes_on_few_cores()


def attend_as_chunks_of_one(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    *,
    scale: float,
    segments: Int[Array, "B T"] | None,
) -> Float[Array, "B T H E"]:
    """Attends to all earlier tokens as the ends of chunks of one.

    The token itself is the own term. So attention has that op's kernels, skips what is
    hidden, and keeps inputs, o and log normalizers for the gradient.
    """
    k, v = (keys_for_queries(x, q.shape[2]) for x in (k, v))
    # The token's own logit, apart from those of earlier tokens, as the op takes it.
    own_logits = jnp.sum(q.astype(jnp.promote_types(q.dtype, jnp.float32)) * k, axis=-1)
    ends = ChunkEnds(k.swapaxes(1, 2), v.swapaxes(1, 2), segments)
    return chunk_attention(
        q, own_logits, v, ends, chunk=1, scale=scale, documents=segments
    )


class Past(NamedTuple):
    """The last tokens before those of a call, where a row is cut over devices.

    Attributes:
      keys, values: keys and values of at least as many tokens as the window, with the
        queries' heads.
      documents: their documents' numbers, where the call has some.
      start: position of the call's first token; tokens before position 0 are not
        tokens.
    """

    keys: Float[Array, "B P H E"]
    values: Float[Array, "B P H E"]
    documents: Int[Array, "B P"] | None
    start: Int[Array, ""]


def attend_in_window(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T H E"],
    v: Float[Array, "B T H E"],
    *,
    scale: float,
    window: int,
    documents: Int[Array, "B T"] | None,
    past: Past,
) -> Float[Array, "B T H E"]:
    """Attends block by block: one of `size` queries sees its own keys and W before.

    Small blocks waste little on keys outside the window, and each key is copied once
    for every block that sees it: a quarter of the window, and no less than 256, is the
    fastest measured on CPU.

    Args:
      window: W; keys at a distance of up to W are visible.
      documents: document number of each token; other documents are hidden. None: one
        document.
      past: keys and values before the first token.
    """
    B, T, H, E = q.shape
    # Blocks no larger than the window: a block's keys are its own and W before it.
    size = max(1, min(window, max(_QUERIES, -(-window // 4))))
    before = -(-window // size)
    blocks = -(-T // size)

    def fold(x: Array) -> Array:
        """Cuts tokens into blocks, in front, tokens then before the last axes."""
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)))
        x = x.reshape(B, -1, size, *x.shape[2:]).swapaxes(0, 1)
        return x if x.ndim == 3 else x.swapaxes(2, 3)  # [blocks, B, H, size, E]

    def with_past(x: Array, earlier: Array) -> Array:
        """Gives each block the tokens that it may see: `before` blocks and its own."""
        # Full blocks of past, however little there is: pad with zeros, which their
        # positions hide below.
        room = before * size
        earlier = earlier[:, max(earlier.shape[1] - room, 0) :]
        missing = ((0, 0), (room - earlier.shape[1], 0), *[(0, 0)] * (x.ndim - 2))
        x = jnp.concatenate([fold(jnp.pad(earlier, missing)), fold(x)])
        parts = [x[i : i + blocks] for i in range(before + 1)]
        return jnp.concatenate(parts, axis=2 if x.ndim == 3 else 3)

    # A block's keys begin `before` blocks before its queries.
    S = (before + 1) * size
    distance = before * size + jnp.arange(size)[:, None] - jnp.arange(S)
    near = (distance >= 0) & (distance <= window)
    parts = {
        "q": fold(q),
        "k": with_past(k, past.keys),
        "v": with_past(v, past.values),
        "first": past.start + size * jnp.arange(blocks),
    }
    if documents is not None:
        assert past.documents is not None
        seen = with_past(documents, past.documents)
        parts |= {"own": fold(documents), "seen": seen}

    # The gradient makes each block's logits again: kept, they would be T (W + size)
    # numbers a head.
    @jax.checkpoint
    def block(part: dict[str, Array]) -> Array:
        # There is nothing before token 0.
        there = part["first"] + jnp.arange(S) >= before * size
        mask = near & there
        if "own" in part:
            same = part["own"][:, :, None] == part["seen"][:, None]
            mask = mask & same[:, None]
        return _attend_masked(part["q"], part["k"], part["v"], scale, mask)

    o = jax.lax.map(block, parts)
    return o.transpose(1, 0, 3, 2, 4).reshape(B, -1, H, E)[:, :T]


def _attend_masked(q, k, v, scale: float, mask: Array) -> Array:
    """Attends within a block, [B, H, t, E]; every query sees itself at least."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    logits = jnp.where(mask, scale * product("bhte,bhse->bhts", q, k), -jnp.inf)
    # The softmax does not depend on the subtracted maximum, nor does its gradient.
    highest = jax.lax.stop_gradient(reductions.largest(logits)[..., None])
    weights = jnp.exp(logits - highest)
    o = product("bhts,bhse->bhte", weights.astype(v.dtype), v)
    return (o / weights.sum(axis=-1, keepdims=True)).astype(q.dtype)
