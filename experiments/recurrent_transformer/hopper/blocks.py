"""Blocks of 64 rows: their layout in registers and on chip, and how they are read."""

from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from experiments.recurrent_transformer.hopper.launch import CHUNK, SIDE, Launch
from pallas_kernels.recurrent_prefill.call import Array

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


def swizzled(*shape: int) -> Any:
    """Returns shared memory for 16-bit chunks that the matrix unit reads."""
    transforms = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(2 * CHUNK))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def turned(launch: Launch, held: Any, n) -> Any:
    """Returns chunk n of a weight held [C, D], as [CHUNK, C]."""
    chunk = pl.ds(n * CHUNK, CHUNK)
    # The interpreter multiplies by no turned block: it gets weights [D, C].
    if launch.interpret:
        return held.at[chunk]
    return plgpu.transpose_ref(held.at[:, chunk], (1, 0))


def over_columns(
    vector: Float[Array, " rows"], columns: int
) -> Float[Array, "rows columns"]:
    """Repeats one value per row over columns."""
    return jax.lax.broadcast_in_dim(vector, (vector.shape[0], columns), (0,))


def over_rows(vector: Float[Array, " columns"]) -> Float[Array, "64 columns"]:
    """Repeats one value per column over the 64 rows."""
    return jax.lax.broadcast_in_dim(vector, (SIDE, vector.shape[0]), (1,))
