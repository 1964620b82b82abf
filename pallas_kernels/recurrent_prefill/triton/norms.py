"""Norms on GPU: programs see parts of a row, so row sums pass between kernels.

Forward: a product's program sees some columns of a row only. It writes their mean and
the sum of squared deviations, [L, programs, 2, B], the column programs rounded up to a
power of two; the reader joins them (Chan, Golub and LeVeque, 1979), so that nothing
cancels.

Backward: a kernel of its own reads whole rows twice, for the sums and for the result;
the k-norm's is spread over `own_tile_backward` and `pair_product_back`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from pallas_kernels.powers import next_power
from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    launch_kernel,
    like,
    one_slot,
    power_dividing,
)


def shape_of_statistics(layers: int, columns: int, batch: int) -> jax.ShapeDtypeStruct:
    """Returns the array that `columns` column programs write."""
    shape = (layers, next_power(columns), 2, batch)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def write_spec(rows: int) -> pl.BlockSpec:
    """Returns the block of program (layer, row program, column program)."""
    return pl.BlockSpec((None, None, 2, rows), lambda l, i, j, *_: (l, j, 0, i))


def read_spec(statistics: Float[Array, "L programs 2 B"], rows: int) -> pl.BlockSpec:
    """Returns all statistics of the rows of a program."""
    programs = statistics.shape[1]
    return pl.BlockSpec((None, programs, 2, rows), lambda l, i, *_: (l, 0, 0, i))


def write_statistics(ref, values: Float[Array, "rows columns"]) -> None:
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
    programs, _, rows = ref.shape
    if kind == "none":
        return jnp.zeros(rows, jnp.float32), jnp.ones(rows, jnp.float32)
    # The array is rounded up to a power of two; no program wrote the rest.
    written = (
        jax.lax.broadcasted_iota(jnp.int32, (programs, rows), 0) < width // columns
    )
    means = jnp.where(written, ref[:, 0, :], 0.0)
    total = jnp.sum(jnp.where(written, ref[:, 1, :], 0.0), axis=0)
    subtracted = jnp.zeros(rows, jnp.float32)
    if kind == "layer":
        subtracted = jnp.sum(means, axis=0) * (columns / width)
    # Squared deviations from the row's mean are those from each part's own mean, plus
    # what the parts' means are apart. RMSNorm takes 0 for the mean.
    apart = jnp.where(written, means - subtracted[None, :], 0.0)
    total = total + columns * jnp.sum(apart * apart, axis=0)
    return subtracted, jax.lax.rsqrt(total / width + eps)


def norm_back(
    launch: Launch,
    t: Int[Array, "1"],
    base: Float[Array, "L _ B D"],
    dn: Float[Array, "L b B D"],
    unit: Float[Array, "L b B D"],
    factor: Float[Array, "L b B"],
    scale: Float[Array, "L D"],
    out: Float[Array, "L b B D"],
    *,
    kind: str,
):
    """Writes out[t] = base[t] + norm back (dn[t]); returns it and s out[t].

    Args:
      unit: normalised rows before the norm's scale, [L, b, B, D].
      factor: what the norm multiplied by, [L, b, B].
    """
    L, b, B, D = out.shape
    block = launch.tiles.attend_rows
    row = lambda array: pl.BlockSpec(  # noqa: E731
        (None, array.shape[1], block, D), lambda l, i: (l, 0, i, 0)
    )
    return launch_kernel(
        launch,
        _norm_back_kernel,
        *(t, base, dn, unit, factor, scale, out),
        refs=_NormBackRefs,
        grid=(L, B // block),
        in_specs=[
            POSITION,
            *(row(base), row(dn), row(unit)),
            pl.BlockSpec((None, b, block), lambda l, i: (l, 0, i)),
            pl.BlockSpec((None, D), lambda l, i: (l, 0)),
            row(out),
        ],
        out_specs=[
            row(out),
            pl.BlockSpec((None, 1, block, D), lambda l, i: (l, 0, i, 0)),
        ],
        out_shape=[like(out), jax.ShapeDtypeStruct((L, 1, B, D), launch.spec.dtype)],
        aliases={6: 0},
        reads={1: one_slot(base)} | dict.fromkeys((2, 3, 4), one_slot(out)),
        writes={0: one_slot(out)},
        kind=kind,
        residual_scale=launch.spec.residual_scale,
        depth=power_dividing(D, 1024),
    )


class _NormBackRefs(NamedTuple):
    """References of `_norm_back_kernel`."""

    t: Any  # int32 [1]: the position within the tile
    base: Any  # [b, rows, D]
    dn: Any  # [b, rows, D]: gradient of what the norm returned
    unit: Any  # [b, rows, D]: rows before the norm's scale
    factor: Any  # [b, rows]: what the norm multiplied by
    scale: Any  # [D], of the norm
    before: Any  # the array that `out` is written into; not read
    out: Any  # out, [b, rows, D]
    scaled: Any  # out, [1, rows, D]: s times the new row of out


# A program owns a few whole rows, read twice: for the sums and for the result.
def _norm_back_kernel(refs: _NormBackRefs, *, kind, residual_scale, depth):
    t = refs.t[0]
    rows, D = refs.out.shape[1:]

    def add(c, sums):
        part = pl.ds(c * depth, depth)
        g = refs.dn[t, :, part] * refs.scale[part][None, :]
        along, level = sums
        return along + jnp.sum(g * refs.unit[t, :, part], axis=1), level + jnp.sum(
            g, axis=1
        )

    none = jnp.zeros(rows, jnp.float32)
    along, level = jax.lax.fori_loop(0, D // depth, add, (none, none))
    along, level, factor = along / D, level / D, refs.factor[t]

    # The sums are known: the same rows once more, for the result.
    def write(c, _):
        part = pl.ds(c * depth, depth)
        g = refs.dn[t, :, part] * refs.scale[part][None, :]
        g = _standardised_back(g, refs.unit[t, :, part], factor, along, level, kind)
        total = refs.base[t, :, part] + g
        refs.out[t, :, part] = total
        refs.scaled[0, :, part] = (residual_scale * total).astype(refs.scaled.dtype)
        return 0

    jax.lax.fori_loop(0, D // depth, write, 0)


def _standardised_back(
    g: Float[Array, "rows columns"],
    unit: Float[Array, "rows columns"],
    factor: Float[Array, " rows"],
    along: Float[Array, " rows"],
    level: Float[Array, " rows"],
    kind: str,
) -> Float[Array, "rows columns"]:
    """Maps the gradient of unit rows back through their standardisation."""
    if kind == "none":
        return g
    g = g - unit * along[:, None]
    if kind == "layer":
        g = g - level[:, None]
    return g * factor[:, None]
