"""Blocks of 64 rows: how they lie in registers and on chip, and how they are read."""

from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import SIDE, Launch

TILE = plgpu.Layout.WGMMA
"""The layout of [64, columns] in registers, as the matrix unit leaves it."""
BY_ROW = TILE.reduce(1)
BY_COLUMN = TILE.reduce(0)
# What jax 0.10's load wants besides a reference; 0.12's takes nothing.
_WHOLE = (...,) if "idx" in signature(plgpu.load).parameters else ()


def read(launch: Launch, ref: Any, *index: Any, layout: Any = TILE) -> Array:
    """Reads from global memory into registers of a layout."""
    # The interpreter knows no layouts, nor jax's load that takes one.
    if launch.interpret:
        return ref[index]
    return plgpu.load(ref.at[index], *_WHOLE, layout=layout, optimized=False)


def laid_out(launch: Launch, x: Array, layout: Any = TILE) -> Array:
    """Tells the compiler the layout of an array in registers."""
    return x if launch.interpret else plgpu.layout_cast(x, layout)


def swizzled(*shape: int) -> Any:
    """Returns shared memory for 16-bit blocks that the matrix unit reads."""
    transforms = (plgpu.TilingTransform((8, SIDE)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def over_columns(
    vector: Float[Array, " rows"], columns: int
) -> Float[Array, "rows columns"]:
    """Repeats one value a row over columns."""
    return jax.lax.broadcast_in_dim(vector, (vector.shape[0], columns), (0,))


def over_rows(vector: Float[Array, " columns"]) -> Float[Array, "64 columns"]:
    """Repeats one value a column over the 64 rows."""
    return jax.lax.broadcast_in_dim(vector, (SIDE, vector.shape[0]), (1,))


def put(value: Float[Array, "64 columns"], stage: Any, target: Any) -> None:
    """Writes a block to memory by way of shared memory, rounded; waits until it lies.

    What other programs copy on chip has to come this way: a plain write and a copy
    engine's read have no order.
    """
    stage[:] = value.astype(stage.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, target)
    plgpu.wait_smem_to_gmem(0)
