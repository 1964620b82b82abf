"""What a cache's cotangents give the pairs that a call wrote, and the old slots."""

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array, RecurrentCache, Rows
from pallas_kernels.recurrent_prefill.tiles.layout import from_slots


def written_cotangents(
    dcache: RecurrentCache, cache: RecurrentCache, rows: Rows, T: int
) -> tuple[Array, Array]:
    """Returns the cache's gradients of the new pairs, float32 [L, B, T, K E]."""
    at, real = _written(cache, rows, T)
    at = jnp.minimum(at, cache.slots - 1)

    def take(part: Array) -> Array:
        part = part.reshape(*part.shape[:3], -1).astype(jnp.float32)
        part = part[:, jnp.arange(at.shape[0])[:, None], at]
        return jnp.where(real[..., None], part, 0.0)

    return take(dcache.keys), take(dcache.values)


def _written(cache: RecurrentCache, rows: Rows, T: int) -> tuple[Array, Array]:
    """Returns the slots [B, T] that a call writes, and which of them it does write."""
    at = cache.position[:, None] + jnp.arange(T)
    count = T if rows.lengths is None else rows.lengths[:, None]
    return at, (jnp.arange(T) < count) & (at < cache.slots)


def old_cache_cotangents(
    cache: RecurrentCache,
    dcache: RecurrentCache,
    dslots: tuple[Array, Array] | None,
    rows: Rows,
    T: int,
) -> RecurrentCache:
    """Adds what passes through the slots that the call did not write."""
    floats = cache._replace(position=None, written=None)
    zeros = jax.tree.map(jnp.zeros_like, floats)
    if dslots is None:
        return zeros
    # A slot that the call wrote hides the old one: its gradient went to the new pair.
    at, real = _written(cache, rows, T)
    at = jnp.where(real, at, cache.slots)  # out of range: dropped
    batch = jnp.arange(at.shape[0])[:, None]

    def pass_through(through: Array, added: Array, old: Array) -> Array:
        through = through.at[:, batch, at].set(0, mode="drop")
        return through.astype(old.dtype) + from_slots(added, old)

    return zeros._replace(
        keys=pass_through(dcache.keys, dslots[0], cache.keys),
        values=pass_through(dcache.values, dslots[1], cache.values),
    )
