"""Attention in pieces: running maximum, normalizer and weighted values per query."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array


class Running(NamedTuple):
    """State of queries [L, B, K, G, T] that have met a part of their keys.

    Attributes:
      largest: m, the largest logit so far.
      normalizer: l = sum of exp(logit - m).
      weighted: sum of exp(logit - m) v, [..., T, E].
    """

    largest: Array
    normalizer: Array
    weighted: Array


def merge(running: Running, logits: Array, v: Array, dtype) -> Running:
    """Adds keys: logits [L, B, K, G, T, S], v [L, B, K, S, E]."""
    largest = jnp.maximum(running.largest, jnp.max(logits, axis=-1))
    shrink = jnp.exp(running.largest - largest)
    p = jnp.exp(logits - largest[..., None])
    return Running(
        largest,
        running.normalizer * shrink + jnp.sum(p, axis=-1),
        running.weighted * shrink[..., None] + weigh(p, v, dtype),
    )


def finish(running: Running) -> tuple[Array, Array]:
    """Returns the attended values and the log of the sum of exp(logits)."""
    attended = running.weighted / running.normalizer[..., None]
    return attended, running.largest + jnp.log(running.normalizer)


def logits_of(q: Array, k: Array, scale: float) -> Array:
    """Returns scale q k^T, [L, B, K, G, T, S]; k lies as [L, B, K, E, S]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("lbkgte,lbkes->lbkgts", q, k, preferred_element_type=wide)
    return logits * scale


def weigh(p: Array, v: Array, dtype) -> Array:
    """Returns p v with operands in `dtype`, accumulated in p's."""
    return jnp.einsum(
        "lbkgts,lbkse->lbkgte", p.astype(dtype), v, preferred_element_type=p.dtype
    )
