"""Row statistics that one kernel leaves behind and the next one's norm reads.

A product's program sees some columns of a row only. It writes their mean and the sum of
squared deviations, [L, P, 2, B] with P >= the number of column programs; the reader
joins them (Chan, Golub and LeVeque, 1979), so that nothing cancels.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.recurrent_prefill.triton.launch import next_power


def shape_of_statistics(layers: int, columns: int, batch: int) -> jax.ShapeDtypeStruct:
    """Returns the array that `columns` column programs write."""
    shape = (layers, next_power(columns), 2, batch)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def write_spec(rows: int) -> pl.BlockSpec:
    """Returns the block of program (layer, row program, column program)."""
    return pl.BlockSpec((None, None, 2, rows), lambda l, i, j: (l, j, 0, i))


def read_spec(statistics: jax.Array, rows: int, row_axis: int = 1) -> pl.BlockSpec:
    """Returns all statistics of the rows of a program."""
    P = statistics.shape[1]
    return pl.BlockSpec((None, P, 2, rows), lambda *at: (at[0], 0, 0, at[row_axis]))


def write_statistics(ref, values: jax.Array) -> None:
    """Writes mean and squared deviations of a program's columns [rows, columns]."""
    mean = jnp.sum(values, axis=1) / values.shape[1]
    deviation = values - mean[:, None]
    ref[0, :] = mean
    ref[1, :] = jnp.sum(deviation * deviation, axis=1)


def read_statistics(ref, *, width: int, columns: int, kind: str, eps: float):
    """Returns what a norm subtracts from each row and what it multiplies it by.

    Args:
      width: of the whole row.
      columns: width of one program's part.
    """
    P, _, rows = ref.shape
    if kind == "none":
        return jnp.zeros(rows, jnp.float32), jnp.ones(rows, jnp.float32)
    written = jax.lax.broadcasted_iota(jnp.int32, (P, rows), 0) < width // columns
    means = jnp.where(written, ref[:, 0, :], 0.0)
    total = jnp.sum(jnp.where(written, ref[:, 1, :], 0.0), axis=0)
    subtracted = jnp.zeros(rows, jnp.float32)
    if kind == "layer":
        subtracted = jnp.sum(means, axis=0) * (columns / width)
    apart = jnp.where(written, means - subtracted[None, :], 0.0)
    total = total + columns * jnp.sum(apart * apart, axis=0)
    return subtracted, jax.lax.rsqrt(total / width + eps)
