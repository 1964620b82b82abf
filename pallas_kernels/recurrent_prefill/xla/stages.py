"""The wavefront over devices: what passes between stages, inside a `shard_map`.

Stage s holds layers s L to (s + 1) L - 1. At every step of the loop it hands one tile
to the stage above, in the backward pass to the one below. Rows that only the first or
the last stage has are given to all once, outside the loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry


class Stages(NamedTuple):
    """Devices that the layers lie on, and their mesh axis."""

    count: int
    axis: str | None


ONE_STAGE = Stages(1, None)


def from_below(first: Array, z: Array, geometry: Geometry) -> Array:
    """Returns every layer's input [L, ...]: `first` [1, ...] for the first layer.

    Args:
      z: outputs [L, ...] of this stage's layers.
    """
    if geometry.axis is not None:
        up = [(s, s + 1) for s in range(geometry.stages - 1)]
        below = jax.lax.ppermute(z[-1:], geometry.axis, up)
        first = jnp.where(jax.lax.axis_index(geometry.axis) == 0, first, below)
    return jnp.concatenate([first, z[:-1]]) if z.shape[0] > 1 else first


def from_above(last: Array, for_x: Array, geometry: Geometry) -> Array:
    """Returns the gradient of every layer's z [L, ...]: `last` for the last layer's.

    Args:
      for_x: gradients of this stage's layers' inputs.
    """
    if geometry.axis is not None:
        down = [(s + 1, s) for s in range(geometry.stages - 1)]
        above = jax.lax.ppermute(for_x[:1], geometry.axis, down)
        top = geometry.stages - 1
        last = jnp.where(jax.lax.axis_index(geometry.axis) == top, last, above)
    return jnp.concatenate([for_x[1:], last]) if for_x.shape[0] > 1 else last


def of_first_stage(rows: Array, geometry: Geometry) -> Array:
    """Gives the first stage's rows to all."""
    return _of_stage(rows, geometry, 0)


def of_last_stage(rows: Array, geometry: Geometry) -> Array:
    """Gives the last stage's rows to all."""
    return _of_stage(rows, geometry, geometry.stages - 1)


def _of_stage(rows: Array, geometry: Geometry, stage: int) -> Array:
    if geometry.axis is None:
        return rows
    own = jax.lax.axis_index(geometry.axis) == stage
    return jax.lax.psum(jnp.where(own, rows, 0), geometry.axis)
