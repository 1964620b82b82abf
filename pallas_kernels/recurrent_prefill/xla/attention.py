"""Queries and pairs as the XLA path's loops read them, and attention in pieces.

A query reads its keys a stretch at a time. It carries the largest logit so far, the sum
of exponentials relative to it, and the values weighted by them (online softmax).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec, RecurrentCache
from pallas_kernels.recurrent_prefill.equations import (
    NormParameters,
    Prepared,
    Rotary,
    linear,
    norm_and_rotate,
    pre_norm,
)


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


def from_rows(k: Float[Array, "L T B K E"], v: Float[Array, "L T B K E"]) -> Pairs:
    """Turns rows [L, T, B, K, E] into pairs."""
    return Pairs(jnp.moveaxis(k, 1, 4), jnp.moveaxis(v, 1, 3))


def to_rows(
    pairs: Pairs,
) -> tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]]:
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


def queries_and_pairs(
    x: Float[Array, "L T B D"],
    w: Prepared,
    rotary: Rotary | None,
    spec: LayerSpec,
) -> tuple[Float[Array, "L B K Q T E"], Pairs]:
    """Projects rows [L, T, B, D] into queries [L, B, K, Q, T, E] and own pairs."""
    flat = linear(pre_norm(x, w.attention_norm, spec), w.w_qkv, w.b_qkv)
    heads = heads_of_projections(flat, w.q_norm, w.k_norm, rotary, spec)
    return jax.tree.map(lambda part: part.astype(spec.dtype), heads)


def heads_of_projections(
    flat: Float[Array, "L T B N"],
    q_norm: NormParameters,
    k_norm: NormParameters,
    rotary: Rotary | None,
    spec: LayerSpec,
) -> tuple[Float[Array, "L B K Q T E"], Pairs]:
    """Turns rows of w_qkv's output into queries and pairs, still wide."""
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    q, k, v = jnp.split(flat, [H * E, (H + K) * E], axis=-1)
    q = norm_and_rotate(q, q_norm, rotary, spec)
    q = jnp.moveaxis(q.reshape(*q.shape[:3], K, H // K, E), 1, 4)
    k = norm_and_rotate(k, k_norm, rotary, spec)
    return q, from_rows(k, v.reshape(k.shape))


def pairs_of(
    k: Float[Array, "L T B KE"],
    v: Float[Array, "L T B KE"],
    w: Prepared,
    rotary: Rotary | None,
    spec: LayerSpec,
) -> Pairs:
    """Turns projections [L, T, B, K E] into pairs."""
    k = norm_and_rotate(k, w.k_norm, rotary, spec).astype(spec.dtype)
    return from_rows(k, v.reshape(k.shape).astype(spec.dtype))


class Running(NamedTuple):
    """State of queries [L, B, K, Q, T] that have read a part of their keys.

    Attributes:
      largest: m, the largest logit so far.
      normalizer: l = sum of exp(logit - m).
      weighted: sum of exp(logit - m) v, [..., T, E].
    """

    largest: Array
    normalizer: Array
    weighted: Array


def merge(
    running: Running,
    logits: Float[Array, "L B K Q T S"],
    v: Float[Array, "L B K S E"],
    dtype,
) -> Running:
    """Adds keys: logits [L, B, K, Q, T, S], v [L, B, K, S, E]."""
    largest = jnp.maximum(running.largest, jnp.max(logits, axis=-1))
    shrink = jnp.exp(running.largest - largest)
    p = jnp.exp(logits - largest[..., None])
    return Running(
        largest,
        running.normalizer * shrink + jnp.sum(p, axis=-1),
        running.weighted * shrink[..., None] + weigh(p, v, dtype),
    )


def finish(
    running: Running,
) -> tuple[Float[Array, "L B K Q T E"], Float[Array, "L B K Q T"]]:
    """Returns the attended values and the log of the sum of exp(logits)."""
    attended = running.weighted / running.normalizer[..., None]
    return attended, running.largest + jnp.log(running.normalizer)


def logits_of(
    q: Float[Array, "L B K Q T E"], k: Float[Array, "L B K E S"], scale: float
) -> Float[Array, "L B K Q T S"]:
    """Returns scale q k^T, [L, B, K, Q, T, S]; k lies as [L, B, K, E, S]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("lbkqte,lbkes->lbkqts", q, k, preferred_element_type=wide)
    return logits * scale


def weigh(
    p: Float[Array, "L B K Q T S"], v: Float[Array, "L B K S E"], dtype
) -> Float[Array, "L B K Q T E"]:
    """Returns p v with operands in `dtype`, accumulated in p's."""
    return jnp.einsum(
        "lbkqts,lbkse->lbkqte", p.astype(dtype), v, preferred_element_type=p.dtype
    )
