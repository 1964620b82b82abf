"""The biases of one step of the XLA path's loops."""

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.xla.biases import (
    Placement,
    bias_of_slots,
    chunk_slots,
    step_slots,
)
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry


def own_unit_bias(place: Placement, j, geometry: Geometry, dtype) -> Array:
    """Returns biases [L or 1, B or 1, K or 1, G or 1, units, u, u] within the units."""

    def of_unit(slots):
        return bias_of_slots(place, slots, slots, slots[:, None] >= slots, dtype)

    slots = step_slots(j, geometry).reshape(geometry.units, geometry.unit)
    return jax.vmap(of_unit, out_axes=4)(slots)


def tile_bias(place: Placement, j, geometry: Geometry, dtype) -> Array:
    """Returns biases [..., b, b] between a tile's queries and its earlier units."""
    slots = step_slots(j, geometry)
    unit = jnp.arange(geometry.tile) // geometry.unit
    return bias_of_slots(place, slots, slots, unit[:, None] > unit, dtype)


def prefix_bias(place: Placement, j, chunk, geometry: Geometry, dtype) -> Array:
    """Returns biases [..., b, chunk] for keys of earlier tiles."""
    keys = chunk_slots(chunk, geometry)
    before = jnp.broadcast_to(keys < j * geometry.tile, (geometry.tile, keys.size))
    return bias_of_slots(place, step_slots(j, geometry), keys, before, dtype)


def prefix_chunks(j, geometry: Geometry):
    """Returns how many chunks of keys hold all earlier tiles."""
    return -(-j * geometry.tile // geometry.chunk)
