"""Gradients of attention in pieces: probabilities are rebuilt, never kept.

With p = exp(logits - lse), delta = sum_e do o:
dv = p^T do;  ds = p (do v^T - delta);  dq = scale ds k;  dk = scale ds^T q.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.xla.attention import Pairs, logits_of, weigh
from pallas_kernels.recurrent_prefill.xla.biases import (
    own_unit_bias,
    prefix_bias,
    prefix_chunks,
)
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry


class Attending(NamedTuple):
    """Queries as the backward pass reads them; q and do in spec.dtype.

    Attributes:
      q: [L, B, K, Q, T, E].
      lse: [L, B, K, Q, T].
      do: gradient of the attended values, [L, B, K, Q, T, E].
      delta: [L, B, K, Q, T].
    """

    q: Array
    lse: Array
    do: Array
    delta: Array


class PairColumns(NamedTuple):
    """Pairs as the backward pass reads them, so that it transposes none.

    Keys and values are [L, B, K, E, S], the keys also rows [L, B, K, S, E].
    """

    keys: Array
    values: Array
    key_rows: Array


class PairGradients(NamedTuple):
    """Gradients of keys and values, both [L, B, K, E, S], in a wide dtype."""

    dk: Array
    dv: Array


def columns_of(pairs: Pairs) -> PairColumns:
    """Lays pairs out for the backward pass."""
    keys, values = pairs
    return PairColumns(keys, jnp.swapaxes(values, 3, 4), jnp.swapaxes(keys, 3, 4))


def cut_columns(pairs: PairColumns, start, size: int) -> PairColumns:
    """Takes `size` slots from `start` on."""
    read = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
    keys, values, key_rows = pairs
    return PairColumns(read(keys, axis=4), read(values, axis=4), read(key_rows, axis=3))


def probabilities(
    of: Attending,
    pairs: PairColumns,
    bias: Float[Array, "#L #B #K #Q T S"],
    scale: float,
) -> Float[Array, "L B K Q T S"]:
    """Returns p [L, B, K, Q, T, S], in a wide dtype."""
    logits = logits_of(of.q, pairs.keys, scale) + bias
    return jnp.exp(logits - of.lse[..., None])


def logit_gradients(
    p: Float[Array, "L B K Q T S"],
    do: Float[Array, "L B K Q T E"],
    delta: Float[Array, "L B K Q T"],
    values: Float[Array, "L B K E S"],
) -> Float[Array, "L B K Q T S"]:
    """Returns ds = p (do v^T - delta); values [L, B, K, E, S]."""
    dp = logits_of(do, values, 1.0)
    return p * (dp - delta[..., None])


def query_gradient(
    ds: Float[Array, "L B K Q T S"], key_rows: Float[Array, "L B K S E"], scale: float
) -> Float[Array, "L B K Q T E"]:
    """Returns dq = scale ds k, [L, B, K, Q, T, E]."""
    return scale * weigh(ds, key_rows, key_rows.dtype)


def pair_gradients(
    p: Float[Array, "L B K Q T S"],
    ds: Float[Array, "L B K Q T S"],
    q: Float[Array, "L B K E Q T"],
    do: Float[Array, "L B K E Q T"],
    scale: float,
) -> PairGradients:
    """Returns dk = scale ds^T q and dv = p^T do; q and do lie [L, B, K, E, Q, T]."""

    def gather(rows: Array, weights: Array) -> Array:
        return jnp.einsum(
            "lbkeqt,lbkqts->lbkes",
            rows,
            weights.astype(rows.dtype),
            preferred_element_type=weights.dtype,
        )

    return PairGradients(scale * gather(q, ds), gather(do, p))


def attend_backward(
    of: Attending,
    transposed: tuple[Float[Array, "L B K E Q T"], Float[Array, "L B K E Q T"]],
    pairs: PairColumns,
    bias: Float[Array, "#L #B #K #Q T S"],
    scale: float,
) -> tuple[Float[Array, "L B K Q T E"], PairGradients]:
    """Returns the gradients of queries and of the pairs they attend to.

    Args:
      transposed: q and do as [L, B, K, E, Q, T].
    """
    p = probabilities(of, pairs, bias, scale)
    # Five products: logits, dp, dq, dk and dv. The kernels of the Pallas backends pull
    # dk and dv in a pass of their own and make the first two again.
    ds = logit_gradients(p, of.do, of.delta, pairs.values)
    dq = query_gradient(ds, pairs.key_rows, scale)
    return dq, pair_gradients(p, ds, *transposed, scale)


def transpose_queries(
    of: Attending,
) -> tuple[Float[Array, "L B K E Q T"], Float[Array, "L B K E Q T"]]:
    """Returns q and do as [L, B, K, E, Q, T]."""
    return jnp.moveaxis(of.q, 5, 3), jnp.moveaxis(of.do, 5, 3)


def cut_gradients(dpairs: PairGradients, start, size: int) -> PairGradients:
    """Takes `size` slots from `start` on."""
    read = partial(
        jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=4
    )
    return jax.tree.map(read, dpairs)


def own_unit_backward(
    of: Attending, own: Pairs, visibility, j, geometry: Geometry, spec
) -> tuple[Float[Array, "L B K Q T E"], PairGradients]:
    """Returns gradients of the queries and of the temporary pairs."""
    U, u, wide = geometry.units, geometry.unit, of.delta.dtype

    def by_unit(part: Array, axis: int) -> Array:
        """Moves the units next to the batch: [L, U B, ...]."""
        part = part.reshape(*part.shape[:axis], U, u, *part.shape[axis + 1 :])
        part = jnp.moveaxis(part, axis, 2)
        return part.reshape(part.shape[0], -1, *part.shape[3:])

    # Units do not see each other's temporary pairs: to attention they are more rows of
    # the batch.
    folded = Attending(*(by_unit(part, 4) for part in of))
    pairs = columns_of(Pairs(by_unit(own.keys, 4), by_unit(own.values, 3)))
    bias = own_unit_bias(visibility, j, geometry, wide)
    B = of.q.shape[1]
    # The biases follow the pairs into the batch.
    bias = jnp.broadcast_to(bias, (bias.shape[0], B, *bias.shape[2:]))
    bias = jnp.moveaxis(bias, 4, 2)
    bias = bias.reshape(bias.shape[0], -1, *bias.shape[3:])
    dq, dunit = attend_backward(
        folded, transpose_queries(folded), pairs, bias, spec.logit_scale
    )

    def back(part: Array, axis: int) -> Array:
        part = part.reshape(part.shape[0], B, U, *part.shape[2:])
        part = jnp.moveaxis(part, 2, axis)
        return part.reshape(*part.shape[:axis], U * u, *part.shape[axis + 2 :])

    return back(dq, 4), PairGradients(*(back(part, 4) for part in dunit))


def prefix_backward(
    dq: Float[Array, "L B K Q T E"],
    dpairs: PairGradients,
    of: Attending,
    buffers: PairColumns,
    visibility,
    j,
    geometry: Geometry,
    spec,
) -> tuple[Float[Array, "L B K Q T E"], PairGradients]:
    """Adds gradients of the queries and of all pairs of earlier tiles."""
    if geometry.steps == 1:
        return dq, dpairs
    size, transposed = geometry.chunk, transpose_queries(of)

    def attend_chunk(chunk, carry):
        dq, dpairs = carry
        pairs = cut_columns(buffers, chunk * size, size)
        bias = prefix_bias(visibility, j, chunk, geometry, dq.dtype)
        more, new = attend_backward(of, transposed, pairs, bias, spec.logit_scale)
        # Each tile adds to all pairs before it; a pair's gradient is complete when the
        # reverse loop comes to its own tile.
        old = cut_gradients(dpairs, chunk * size, size)
        new = jax.tree.map(jnp.add, old, new)
        write = partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=chunk * size, axis=4
        )
        return dq + more, jax.tree.map(write, dpairs, new)

    return jax.lax.fori_loop(0, prefix_chunks(j, geometry), attend_chunk, (dq, dpairs))
