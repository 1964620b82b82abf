"""Writes a call's new pairs into the cache, each row at its own position."""

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array, RecurrentCache, Rows
from pallas_kernels.recurrent_prefill.spec import LayerSpec


def write(
    cache: RecurrentCache,
    persistent: tuple[Array, Array],
    temporary: tuple[Array, Array] | None,
    rows: Rows,
    spec: LayerSpec,
) -> RecurrentCache:
    """Writes rows of keys and values [L, T, B, K, E]; padding is dropped.

    Temporary pairs stay for the rows' unfinished blocks only.
    """
    T, B = persistent[0].shape[1:3]
    offset = jnp.arange(T)
    count = jnp.full(B, T) if rows.lengths is None else rows.lengths
    at = cache.position[:, None] + offset  # [B, T]
    real = offset < count[:, None]
    seen = (cache.position + count).astype(cache.position.dtype)
    keys, values = (
        _put(old, new, at, real)
        for old, new in zip((cache.keys, cache.values), persistent, strict=True)
    )
    cache = cache._replace(keys=keys, values=values, position=seen)
    if temporary is None:
        return cache
    c = spec.block
    unfinished = real & (at // c == seen[:, None] // c)
    keys, values = (
        _put(old, new, at % c, unfinished)
        for old, new in zip(
            (cache.temporary_keys, cache.temporary_values), temporary, strict=True
        )
    )
    return cache._replace(temporary_keys=keys, temporary_values=values)


def _put(old: Array, new: Array, slot: Array, kept: Array) -> Array:
    slot = jnp.where(kept, slot, old.shape[2])  # out of range: dropped
    index = (slice(None), jnp.arange(slot.shape[0])[:, None], slot)
    new = jnp.swapaxes(new, 1, 2).astype(old.dtype)  # [L, B, T, K, E]
    return old.at[index].set(new, mode="drop")
