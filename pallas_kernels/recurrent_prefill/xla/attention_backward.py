"""Gradients of attention in pieces: probabilities are rebuilt, never kept.

With p = exp(logits - log_normalizer), delta = sum_e do o:
dv = p^T do;  ds = p (do v^T - delta);  dq = scale ds k;  dk = scale ds^T q.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.xla.attention import Pairs, logits_of, weigh
from pallas_kernels.recurrent_prefill.xla.biases import (
    own_unit_bias,
    prefix_bias,
    prefix_chunks,
)
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry


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


def cut_gradients(of_pairs: PairGradients, start, size: int) -> PairGradients:
    """Takes `size` slots from `start` on."""
    read = partial(
        jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=4
    )
    return jax.tree.map(read, of_pairs)


def leave_own_unit(of: Attending, own: Pairs, place, j, geometry: Geometry, spec):
    """Returns gradients of the queries and of the temporary pairs."""
    U, u, wide = geometry.units, geometry.unit, of.delta.dtype

    def by_unit(part: Array, axis: int) -> Array:
        """Moves the units next to the batch: [L, U B, ...]."""
        part = part.reshape(*part.shape[:axis], U, u, *part.shape[axis + 1 :])
        part = jnp.moveaxis(part, axis, 2)
        return part.reshape(part.shape[0], -1, *part.shape[3:])

    folded = Attending(*(by_unit(part, 4) for part in of))
    pairs = met(Pairs(by_unit(own.keys, 4), by_unit(own.values, 3)))
    bias = own_unit_bias(place, j, geometry, wide)
    B = of.q.shape[1]
    bias = jnp.broadcast_to(bias, (bias.shape[0], B, *bias.shape[2:]))
    bias = jnp.moveaxis(bias, 4, 2)
    bias = bias.reshape(bias.shape[0], -1, *bias.shape[3:])
    for_q, of_own = attend_backward(
        folded, turn_over(folded), pairs, bias, spec.logit_scale
    )

    def back(part: Array, axis: int) -> Array:
        part = part.reshape(part.shape[0], B, U, *part.shape[2:])
        part = jnp.moveaxis(part, 2, axis)
        return part.reshape(*part.shape[:axis], U * u, *part.shape[axis + 2 :])

    return back(for_q, 4), PairGradients(*(back(part, 4) for part in of_own))


def leave_prefix(for_q, of_pairs, of, buffers, place, j, geometry: Geometry, spec):
    """Adds gradients of the queries and of all pairs of earlier tiles."""
    if geometry.steps == 1:
        return for_q, of_pairs
    size, turned = geometry.chunk, turn_over(of)

    def leave(chunk, carry):
        for_q, of_pairs = carry
        pairs = cut_met(buffers, chunk * size, size)
        bias = prefix_bias(place, j, chunk, geometry, for_q.dtype)
        more, new = attend_backward(of, turned, pairs, bias, spec.logit_scale)
        old = cut_gradients(of_pairs, chunk * size, size)
        new = jax.tree.map(jnp.add, old, new)
        write = partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=chunk * size, axis=4
        )
        return for_q + more, jax.tree.map(write, of_pairs, new)

    return jax.lax.fori_loop(0, prefix_chunks(j, geometry), leave, (for_q, of_pairs))
