"""Blocks of the GPU kernels' arrays: how they are read, and the product of two."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies blocks, float32 operands without tf32; accumulates in float32."""
    return jnp.dot(
        a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def slot(ref, t):
    """Returns where position t lies in [slots, rows, width]: one slot serves all."""
    return t if ref.shape[0] > 1 else 0


def warps_of(rows: int, columns: int) -> int:
    """Returns how many warps share a program's accumulator."""
    return 8 if rows * columns > 64 * 128 else 4


def row_spec(array: jax.Array, rows: int) -> pl.BlockSpec:
    """Returns all columns of a program's rows, [slots, rows, width]."""
    return pl.BlockSpec(
        (None, array.shape[1], rows, array.shape[3]), lambda l, i, j: (l, 0, i, 0)
    )


def slot_spec(array: jax.Array, rows: int, columns: int) -> pl.BlockSpec:
    """Returns a program's rows and columns in every slot."""
    return pl.BlockSpec(
        (None, array.shape[1], rows, columns), lambda l, i, j: (l, 0, i, j)
    )


def column_spec(w: jax.Array, columns: int, offset: int = 0) -> pl.BlockSpec:
    """Returns a program's columns of a weight."""
    return pl.BlockSpec((None, w.shape[1], columns), lambda l, i, j: (l, 0, offset + j))


def vector_spec(columns: int, offset: int = 0) -> pl.BlockSpec:
    """Returns a program's columns of a vector [L, N]."""
    return pl.BlockSpec((None, columns), lambda l, i, j: (l, offset + j))


def whole_spec(width: int) -> pl.BlockSpec:
    """Returns all of a vector [L, N]."""
    return pl.BlockSpec((None, width), lambda l, i, j: (l, 0))
