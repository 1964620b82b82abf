"""Gradients of attention in pieces: probabilities are rebuilt, never kept.

With p = exp(logits - log_normalizer), delta = sum_e do o:
dv = p^T do;  ds = p (do v^T - delta);  dq = scale ds k;  dk = scale ds^T q.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.xla.attention import logits_of, weigh
from pallas_kernels.recurrent_prefill.xla.pairs import Pairs


class Attending(NamedTuple):
    """Queries as the backward pass meets them; q and do in spec.dtype.

    Attributes:
      q: [L, B, K, G, T, E].
      log_normalizer: [L, B, K, G, T].
      for_attended: do, [L, B, K, G, T, E].
      delta: [L, B, K, G, T].
    """

    q: Array
    log_normalizer: Array
    for_attended: Array
    delta: Array


class Met(NamedTuple):
    """Pairs as the backward pass meets them, laid out so that nothing is turned over.

    Keys and values are [L, B, K, E, S], the keys also rows [L, B, K, S, E].
    """

    keys: Array
    values: Array
    key_rows: Array


class PairGradients(NamedTuple):
    """Gradients of keys and values, both [L, B, K, E, S], in a wide dtype."""

    keys: Array
    values: Array


def met(pairs: Pairs) -> Met:
    """Lays pairs out for the backward pass."""
    keys, values = pairs
    return Met(keys, jnp.swapaxes(values, 3, 4), jnp.swapaxes(keys, 3, 4))


def cut_met(pairs: Met, start, size: int) -> Met:
    """Takes `size` slots from `start` on."""
    read = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
    keys, values, key_rows = pairs
    return Met(read(keys, axis=4), read(values, axis=4), read(key_rows, axis=3))


def probabilities(of: Attending, pairs: Met, bias: Array, scale: float) -> Array:
    """Returns p [L, B, K, G, T, S], in a wide dtype."""
    logits = logits_of(of.q, pairs.keys, scale) + bias
    return jnp.exp(logits - of.log_normalizer[..., None])


def logit_gradients(
    p: Array, for_attended: Array, delta: Array, values: Array
) -> Array:
    """Returns ds = p (do v^T - delta); values [L, B, K, E, S]."""
    for_p = logits_of(for_attended, values, 1.0)
    return p * (for_p - delta[..., None])


def query_gradient(for_logits: Array, key_rows: Array, scale: float) -> Array:
    """Returns dq = scale ds k, [L, B, K, G, T, E]."""
    return scale * weigh(for_logits, key_rows, key_rows.dtype)


def pair_gradients(
    p: Array, for_logits: Array, q: Array, for_attended: Array, scale: float
) -> PairGradients:
    """Returns dk = scale ds^T q and dv = p^T do; q and do lie [L, B, K, E, G, T]."""

    def gather(rows: Array, weights: Array) -> Array:
        return jnp.einsum(
            "lbkegt,lbkgts->lbkes",
            rows,
            weights.astype(rows.dtype),
            preferred_element_type=weights.dtype,
        )

    return PairGradients(scale * gather(q, for_logits), gather(for_attended, p))


def attend_backward(
    of: Attending, turned: tuple[Array, Array], pairs: Met, bias: Array, scale: float
) -> tuple[Array, PairGradients]:
    """Returns the gradients of queries and of the pairs they meet.

    Args:
      turned: q and do as [L, B, K, E, G, T].
    """
    p = probabilities(of, pairs, bias, scale)
    for_logits = logit_gradients(p, of.for_attended, of.delta, pairs.values)
    for_q = query_gradient(for_logits, pairs.key_rows, scale)
    return for_q, pair_gradients(p, for_logits, *turned, scale)


def turn_over(of: Attending) -> tuple[Array, Array]:
    """Returns q and do as [L, B, K, E, G, T]."""
    return jnp.moveaxis(of.q, 5, 3), jnp.moveaxis(of.for_attended, 5, 3)
