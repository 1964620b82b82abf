"""Keys and values of the XLA path's loops; keys lie transposed, as q k^T reads them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array, RecurrentCache
from pallas_kernels.recurrent_prefill.spec import LayerSpec


class Pairs(NamedTuple):
    """Keys [L, B, K, E, S] and values [L, B, K, S, E]."""

    keys: Array
    values: Array


def empty_pairs(layers: int, batch: int, slots: int, spec: LayerSpec, dtype) -> Pairs:
    """Makes zeros for `slots` pairs."""
    shape = (layers, batch, spec.key_heads)
    E = spec.head_width
    return Pairs(
        jnp.zeros((*shape, E, slots), dtype), jnp.zeros((*shape, slots, E), dtype)
    )


def put(pairs: Pairs, new: Pairs, start) -> Pairs:
    """Writes pairs from slot `start` on."""
    update = jax.lax.dynamic_update_slice_in_dim
    return Pairs(
        update(pairs.keys, new.keys, start, axis=4),
        update(pairs.values, new.values, start, axis=3),
    )


def cut(pairs: Pairs, start, size: int) -> Pairs:
    """Takes `size` slots from `start` on."""
    read = jax.lax.dynamic_slice_in_dim
    return Pairs(
        read(pairs.keys, start, size, axis=4), read(pairs.values, start, size, axis=3)
    )


def from_rows(k: Array, v: Array) -> Pairs:
    """Turns rows [L, T, B, K, E] into pairs."""
    return Pairs(jnp.moveaxis(k, 1, 4), jnp.moveaxis(v, 1, 3))


def to_rows(pairs: Pairs) -> tuple[Array, Array]:
    """Turns pairs into rows [L, T, B, K, E]."""
    return jnp.moveaxis(pairs.keys, 4, 1), jnp.moveaxis(pairs.values, 3, 1)


def each(pairs: Pairs, function: Callable[[Array, int], Array]) -> Pairs:
    """Applies `function(part, axis of its slots)` to both parts."""
    return Pairs(function(pairs.keys, 4), function(pairs.values, 3))


def cached_pairs(cache: RecurrentCache, spec: LayerSpec) -> Pairs | None:
    """Returns the cache's persistent pairs, then the open block's temporary ones."""
    if not cache.slots:
        return None
    keys = jnp.concatenate([cache.keys, cache.temporary_keys], axis=2)
    values = jnp.concatenate([cache.values, cache.temporary_values], axis=2)
    keys, values = keys.astype(spec.dtype), values.astype(spec.dtype)
    return Pairs(jnp.moveaxis(keys, 2, 4), jnp.moveaxis(values, 2, 3))
