"""Attention of new tokens to a cache of earlier ones: the new are written, then read.

Every row stands at a position of its own, so what a query sees is told by positions
and never by indices: a mask by index would be wrong wherever a row has a past.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels import target
from pallas_kernels.mesh_cut import as_it_lies
from recurjax.layers.attention.key_value_cache import (
    KeyValueCache,
    read_layer,
    slot_positions,
    write,
)
from recurjax.layers.attention.softmax import attend, visible_by_position
from recurjax.layers.linear import decodes_on_gpu
from recurjax.types import Array

Bias = Callable[[Array, Array], Array | None]
"""From the positions of queries and keys to what is added to the logits, or None."""

_QUERIES = 256
"""Queries of a long prompt that look at once: their logits, B H S numbers a query, are
all that grows with the product of both lengths."""


def attend_to_cache(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    cache: KeyValueCache,
    *,
    scale: float,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> tuple[Float[Array, "B T H E"], KeyValueCache]:
    """Writes T new keys and values at each row's own position, and attends to all.

    Args:
      cache: its `layer` says which entry is written and read.
      window: a key at a distance up to this is visible; None: every earlier key.
      lengths: how many of the T tokens of a row are real; None: all.
      soft_cap, scale: see `attend`.

    Returns:
      What the queries found, and the cache with the new keys and values.

    Raises:
      ValueError: the tokens are more than the cache has room for, and it is no ring
        that holds a whole window.
    """
    written = write(cache, k, v, lengths)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "bias": bias}
    if q.shape[1] == 1 and _goes_to_the_chip(cache):
        seen = _seen_beside_the_write(k, v, cache, lengths)
        return _attend_to_seen(q, seen, cache, written, **options), written
    o = attend_to_written(q, k, v, cache, written, lengths=lengths, **options)
    return o, written


def attend_to_written(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    before: KeyValueCache,
    written: KeyValueCache,
    *,
    scale: float,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> Float[Array, "B T H E"]:
    """Attends to keys and values that were written already.

    Args:
      k, v: the new ones, as they were written.
      before, written: the cache without and with them, in the same entry.
      scale, window, lengths, soft_cap, bias: as in `attend_to_cache`.
    """
    T, slots = q.shape[1], before.slots
    if lengths is None:  # else how many of them are real is not known here
        check_room("attend_to_cache", T, slots=slots, window=window)
    if written.hidden is not None and T > 1:
        raise ValueError(
            f"attend_to_cache: slots are hidden from one token at a time, got {T}"
        )
    seen = _seen(k, v, before, written, window=window, lengths=lengths)
    return _attend_to_seen(
        q,
        seen,
        before,
        written,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        bias=bias,
    )


def check_room(caller: str, tokens: int, *, slots: int, window: int | None) -> None:
    """Raises ValueError when a cache cannot take so many tokens in one call."""
    # Under a window only a ring that holds all of it may be written over.
    holds_all = window is not None and slots > window
    if slots < tokens and not holds_all:
        raise ValueError(
            f"{caller}: {tokens} tokens in one call do not fit a cache of {slots}"
        )


class _Seen(NamedTuple):
    """Keys and values that some queries may see, and their positions.

    keys, values [B, S, K E]-like as in the cache; positions [B, S], negative: empty.
    """

    keys: Float[Array, "B S K E"]
    values: Float[Array, "B S K E"]
    positions: Int[Array, "B S"]


def _attend_to_seen(
    q: Float[Array, "B T H E"],
    seen: _Seen,
    before: KeyValueCache,
    written: KeyValueCache,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    bias: Bias | None,
) -> Float[Array, "B T H E"]:
    T = q.shape[1]
    positions = before.position[:, None] + jnp.arange(T)
    if decodes_on_gpu(q):
        # Left to itself XLA turns the caches of all layers to the layout that the
        # products like best, and back, at every token: four times their bytes.
        keys, values = (as_it_lies(x, rows=0, columns=(2,)) for x in seen[:2])
        seen = seen._replace(keys=keys, values=values)
    # Once for all blocks of queries.
    keys, values = (x.astype(q.dtype) for x in seen[:2])
    seen = seen._replace(keys=keys, values=values)

    def look(q: Array, positions: Array, seen: _Seen) -> Array:
        mask = visible_by_position(positions, seen.positions, window=window)
        if written.hidden is not None:
            mask = mask & ~written.hidden[:, None, None, :]
        return attend(
            q,
            seen.keys,
            seen.values,
            scale=scale,
            causal=False,
            mask=mask,
            bias=None if bias is None else bias(positions, seen.positions),
            soft_cap=soft_cap,
        )

    if T <= 2 * _QUERIES:
        return look(q, positions, seen)
    return _look_in_blocks(look, q, positions, seen, window)


def _seen(k, v, before: KeyValueCache, written: KeyValueCache, *, window, lengths):
    """Returns what the new queries may see, in the order of positions if a window."""
    T, slots = k.shape[1], before.slots
    if T == 1 or window is None:
        # After the write slot s holds the token that the ring rule names; padding has
        # none.
        count = T if lengths is None else lengths
        return _Seen(
            read_layer(written.keys, before.layer),
            read_layer(written.values, before.layer),
            slot_positions(slots, before.position + count),
        )
    # A ring may lose, by this write, keys that the first new queries still see: so they
    # are read from the ring before it, from the oldest on, and the new ones after them.
    at = (before.position[:, None] + jnp.arange(slots)) % slots

    def join(ring: Array, new: Array) -> Array:
        ring = read_layer(ring, before.layer)
        old = jnp.take_along_axis(ring, at[:, :, None, None], axis=1)
        return jnp.concatenate([old, new.astype(ring.dtype)], axis=1)

    first = before.position[:, None] - slots
    return _Seen(
        join(before.keys, k),
        join(before.values, v),
        first + jnp.arange(slots + T),
    )


def _goes_to_the_chip(cache: KeyValueCache) -> bool:
    """Whether XLA would take one layer's cache to a TPU's chip to write a token there.

    Then all of it is written back too. Layers that share a stack are too large for it.
    """
    L = cache.keys.shape[0]
    if L > 1 or not target.prefetches_to_vmem():
        return False
    # A copy with the token in it has to fit beside what else is there: else it is
    # written to memory, which costs more than what is saved.
    return cache.keys.nbytes <= target.vmem_bytes() * 2 // 3


def _seen_beside_the_write(k, v, before: KeyValueCache, lengths) -> _Seen:
    """Returns what one new token sees, of the cache before it and of itself.

    The same numbers as after the write, which so has only its own slot to touch.
    """
    count = 1 if lengths is None else lengths
    positions = slot_positions(before.slots, before.position + count)
    own = positions == before.position[:, None]

    def join(stacked: Array, new: Array) -> Array:
        old = read_layer(stacked, before.layer)
        return jnp.where(own[:, :, None, None], new.astype(old.dtype), old)

    return _Seen(join(before.keys, k), join(before.values, v), positions)


def _look_in_blocks(
    look: Callable[[Array, Array, _Seen], Array],
    q: Array,
    positions: Array,
    seen: _Seen,
    window: int | None,
) -> Array:
    """Lets _QUERIES queries look at a time; under a window, at what they may see."""
    T, S = q.shape[1], seen.positions.shape[1]
    # Under a window the new keys are the last T of S, as the queries are.
    width = S if window is None else min(S, window + _QUERIES)
    begin = jnp.maximum(S - T - (window or 0) + jnp.arange(0, T, _QUERIES), 0)

    def cut(part: Array) -> Array:
        missing = [(0, 0)] * part.ndim
        missing[1] = (0, -T % _QUERIES)
        part = jnp.pad(part, missing)
        return part.reshape(len(part), -1, _QUERIES, *part.shape[2:]).swapaxes(0, 1)

    def block(part) -> Array:
        q, positions, begin = part
        near = seen
        if width < S:
            near = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, begin, width, axis=1), seen
            )
        return look(q, positions, near)

    o = jax.lax.map(block, (cut(q), cut(positions), begin))
    return o.swapaxes(0, 1).reshape(len(q), -1, *q.shape[2:])[:, :T]
