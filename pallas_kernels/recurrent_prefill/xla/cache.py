"""The cache on the XLA path: writes a call's new pairs, each row at its own position.

The backward pass takes the new cache's gradient to the new pairs and the old cache.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerSpec,
    RecurrentCache,
    Rows,
)
from pallas_kernels.recurrent_prefill.xla.attention import Pairs, to_rows
from pallas_kernels.recurrent_prefill.xla.attention_backward import PairGradients
from pallas_kernels.recurrent_prefill.xla.call import Call
from pallas_kernels.recurrent_prefill.xla.geometry import from_slots


def write(
    cache: RecurrentCache,
    persistent: tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]],
    temporary: tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]] | None,
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
    cache = cache._replace(keys=keys, values=values, position=seen, written=seen)
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
    B, T = slot.shape
    # Out of range they are dropped; no two are one, so that the scatter needs no order.
    slot = jnp.where(kept, slot, old.shape[2] + jnp.arange(T))
    index = (slice(None), jnp.arange(B)[:, None], slot)
    new = jnp.swapaxes(new, 1, 2).astype(old.dtype)  # [L, B, T, K, E]
    return old.at[index].set(new, mode="drop", unique_indices=True)


def positions_of_call(
    pairs: Pairs, call: Call, T: int
) -> tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]]:
    """Takes the rows [L, T, B, K, E] of the call's T positions out of pairs."""
    k, v = (from_slots(part, call.phase, T, time=1) for part in to_rows(pairs))
    return k, v


def written_backward(
    dcache: RecurrentCache,
    x: Float[Array, "B T D"],
    cache: RecurrentCache,
    rows: Rows,
    call: Call,
    spec: LayerSpec,
) -> tuple[tuple, RecurrentCache]:
    """Takes the new cache's gradient back to the new pairs and the old cache."""
    if not cache.slots:
        return (None, None), jax.tree.map(jnp.zeros_like, cache)
    B, T = x.shape[:2]
    L, size = cache.keys.shape[0], call.geometry.positions
    shape = (L, B, spec.key_heads, spec.head_width, size)
    zero = PairGradients(jnp.zeros(shape, call.wide), jnp.zeros(shape, call.wide))
    temporary = zero if spec.block > 1 else None

    def write_floats(old, persistent, temporary):
        before = cache._replace(**dict(zip(_PAIRS, old, strict=True)))
        new = positions_of_call(_as_pairs(persistent), call, T)
        if temporary is not None:
            temporary = positions_of_call(_as_pairs(temporary), call, T)
        return write(before, new, temporary, rows, spec)[:4]

    # Writing is linear in the pairs, so it may be taken back at zeros.
    _, pull = jax.vjp(write_floats, cache[:4], zero, temporary)
    dold, *dpairs = pull(dcache[:4])
    # All pairs are written behind such a call: no one reads what one is made of.
    dcache = dcache._replace(source=jnp.zeros_like(cache.source))
    return tuple(dpairs), dcache._replace(**dict(zip(_PAIRS, dold, strict=True)))


_PAIRS = ("keys", "values", "temporary_keys", "temporary_values")
"""Those of a cache's fields that hold pairs, its first four."""


def _as_pairs(gradients: PairGradients) -> Pairs:
    """Gives arrays that lie as pair gradients do the layout of pairs."""
    return Pairs(gradients.dk, jnp.swapaxes(gradients.dv, 3, 4))


def add_cached(dold: RecurrentCache, more: PairGradients, cache: RecurrentCache):
    """Adds gradients [L, B, K, E, S + open] of the cached pairs that were read."""
    k, v = (jnp.moveaxis(part, 4, 2) for part in more)
    S = cache.slots
    parts = {
        "keys": k[:, :, :S],
        "values": v[:, :, :S],
        "temporary_keys": k[:, :, S:],
        "temporary_values": v[:, :, S:],
    }
    return dold._replace(
        **{
            name: getattr(dold, name) + part.astype(getattr(cache, name).dtype)
            for name, part in parts.items()
        }
    )
