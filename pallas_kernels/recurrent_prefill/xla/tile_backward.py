"""What a tile's queries hand back to their own unit and to all earlier tiles."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.xla.attention_backward import (
    Attending,
    PairGradients,
    attend_backward,
    cut_met,
    met,
    turn_over,
)
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry
from pallas_kernels.recurrent_prefill.xla.loop_biases import (
    own_unit_bias,
    prefix_bias,
    prefix_chunks,
)
from pallas_kernels.recurrent_prefill.xla.pairs import Pairs


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
