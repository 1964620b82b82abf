"""Matrix products of a position's step, with norms and activation fused.

Arrays are [L, slots, B, width], slots of a tile or of all positions, and a kernel takes
the position; arrays that live for one position only have a single slot. A program of a
product owns `rows` rows and `columns` columns of one layer's result and keeps its
float32 accumulator in registers.
Operands cross memory once for each program that needs them: rows once per column
program, weights once per row program, both from L2 at the sizes of one layer. What
leaves a program is its part of the result and two statistics a row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import Prepared, activate_in_kernel
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    Position,
    column_spec,
    dot,
    launch_kernel,
    one_slot,
    row_spec,
    vector_spec,
    warps_of,
    whole_spec,
)
from pallas_kernels.recurrent_prefill.triton.norms import (
    read_spec,
    read_statistics,
    shape_of_statistics,
    write_spec,
    write_statistics,
)

Norm = tuple[Float[Array, "L D"], Float[Array, "L D"]]
"""Scale and shift."""


class Folded(NamedTuple):
    """Weights and biases of the products behind the norms, with scale and shift in.

    n(x) W + b = f (x W') + b' with W' = scale W, b' = b + shift W and f the factor by
    which RMSNorm multiplies a row: programs then read rows in the products' dtype and
    multiply their sums once. A layer norm takes off each row's mean first, which those
    sums would lose in bfloat16: it stays apart.
    """

    w_in: Array
    b_in: Array
    w_kv: Array
    b_kv: Array

    @classmethod
    def of(cls, wide: Prepared, spec: LayerSpec) -> "Folded | None":
        """Folds float32 weights; None where the norm stays apart."""
        if spec.norm == "layer":
            return None
        vectors = Vectors.of(wide, spec, wide.w_out.shape[2])

        def fold(norm, w: Array, b: Array) -> tuple[Array, Array]:
            scale, shift = norm
            shifted = jnp.einsum(
                "ln,lnm->lm", shift, w, precision=jax.lax.Precision.HIGHEST
            )
            return (scale[..., None] * w).astype(spec.dtype), b + shifted

        return cls(
            *fold(vectors.mlp_norm, wide.w_in, vectors.b_in),
            *fold(vectors.attention_norm, wide.w_kv, vectors.b_kv),
        )


def hidden_product(
    launch: Launch,
    t: Position,
    x: Float[Array, "L _ B D"],
    statistics: Float[Array, "L programs 2 B"],
    norm: Norm,
    w_in: Float[Array, "L D F_or_2F"],
    b_in: Float[Array, "L F_or_2F"],
    width: int,
    *,
    columns_read: int,
    folded: bool,
) -> Float[Array, "L 1 B F"]:
    """Returns act(n(x[t]) W_up + b), or act(gate) * up, as [L, 1, B, F].

    Args:
      columns_read: of the programs that left the statistics.
      folded: whether w_in and b_in have the norm's scale and shift, which are then
        not read.
    """
    spec, block = launch.spec, launch.tiles.rows
    L, B, D, F = w_in.shape[0], x.shape[2], x.shape[3], width
    gated = w_in.shape[2] != F
    columns = launch.columns(F, L * (B // block))
    if gated:
        # Two accumulators: in float32 beside 128 rows 64 columns spill on 8.0.
        columns = min(columns, 64 if jnp.dtype(spec.dtype).itemsize < 4 else 32)
    up, gate = 0, F // columns if gated else 0
    (hidden,) = launch_kernel(
        launch,
        _hidden_kernel,
        *(*t, x, statistics, *norm, w_in, w_in, b_in, b_in),
        refs=_HiddenRefs,
        grid=(L, B // block, F // columns),
        in_specs=[
            *(POSITION, POSITION),
            row_spec(x, block),
            read_spec(statistics, block),
            whole_spec(D),
            whole_spec(D),
            column_spec(w_in, columns, up),
            column_spec(w_in, columns, gate),
            vector_spec(columns, up),
            vector_spec(columns, gate),
        ],
        out_specs=[pl.BlockSpec((None, None, block, columns), _own_columns)],
        out_shape=[jax.ShapeDtypeStruct((L, 1, B, F), spec.dtype)],
        reads={2: one_slot(x)},
        warps=warps_of(block, 2 * columns if gated else columns),
        stages=launch.stages(2 * columns if gated else columns),
        kind=spec.norm,
        eps=spec.norm_eps,
        folded=folded,
        activation=spec.activation,
        gated=gated,
        columns_read=columns_read,
        depth=launch.depth(D),
    )
    return hidden


def pair_product(
    launch: Launch,
    t: Position,
    z: Float[Array, "L _ B D"],
    statistics: Float[Array, "L programs 2 B"],
    norm: Norm,
    w_kv: Float[Array, "L D KE_and_KE"],
    b_kv: Float[Array, "L KE_and_KE"],
    *,
    columns_read: int,
    folded: bool,
):
    """Returns n(z[t]) [W_k | W_v] + b in float32 [L, B, 2 K E], and its statistics.

    Args:
      columns_read, folded: as of `hidden_product`.
    """
    spec, block = launch.spec, launch.tiles.rows
    L, B, D, N = w_kv.shape[0], z.shape[2], z.shape[3], w_kv.shape[2]
    columns = pair_columns(launch, L, B, N)
    return launch_kernel(
        launch,
        _pair_kernel,
        *(*t, z, statistics, *norm, w_kv, b_kv),
        refs=_PairRefs,
        grid=(L, B // block, N // columns),
        in_specs=[
            *(POSITION, POSITION),
            row_spec(z, block),
            read_spec(statistics, block),
            whole_spec(D),
            whole_spec(D),
            column_spec(w_kv, columns),
            vector_spec(columns),
        ],
        out_specs=[
            pl.BlockSpec((None, block, columns), lambda l, i, j: (l, i, j)),
            write_spec(block),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((L, B, N), jnp.float32),
            shape_of_statistics(L, N // columns, B),
        ],
        reads={2: one_slot(z)},
        warps=warps_of(block, columns),
        stages=launch.stages(columns),
        kind=spec.norm if spec.normed_persistent else "none",
        eps=spec.norm_eps,
        folded=folded,
        columns_read=columns_read,
        depth=launch.depth(D),
    )


def pair_columns(launch: Launch, layers: int, batch: int, width: int) -> int:
    """Returns the columns of a program of the pairs' product; keys fill whole ones."""
    return launch.columns(width // 2, 2 * layers * (batch // launch.tiles.rows))


class _HiddenRefs(NamedTuple):
    """References of `_hidden_kernel`."""

    first: Any  # [1], [1]: the position
    behind: Any
    x: Any  # [positions, rows, D]
    statistics: Any  # [programs, 2, rows]: of x, by the columns that wrote them
    scale: Any  # [D], of the norm
    shift: Any  # [D]
    w_up: Any  # [D, columns]
    w_gate: Any  # [D, columns]; without a gate w_up's, not read
    b_up: Any  # [columns]
    b_gate: Any  # [columns]
    out: Any  # out, [rows, columns]


# A program normalises its rows: their sum at the end, where the norm's scale is in the
# weights, else as it reads them. With a gate it has two accumulators, for the same
# columns of both halves of w_in.
def _hidden_kernel(
    refs: _HiddenRefs, *, kind, eps, folded, activation, gated, columns_read, depth
):
    weights = (refs.w_up, refs.w_gate) if gated else (refs.w_up,)
    # Without a gate, w_gate's specs repeat w_up's columns and are not read.
    up, *gate = _normed_dots(
        refs.x,
        Position(refs.first, refs.behind).slot(refs.x),
        read_statistics(
            refs.statistics,
            width=refs.x.shape[2],
            columns=columns_read,
            kind=kind,
            eps=eps,
        ),
        None if folded else (refs.scale, refs.shift),
        weights,
        depth,
    )
    up = up + refs.b_up[...][None, :]
    if gated:
        hidden = (
            activate_in_kernel(gate[0] + refs.b_gate[...][None, :], activation) * up
        )
    else:
        hidden = activate_in_kernel(up, activation)
    refs.out[:] = hidden.astype(refs.out.dtype)


class _PairRefs(NamedTuple):
    """References of `_pair_kernel`."""

    first: Any  # [1], [1]: the position
    behind: Any
    z: Any  # [positions, rows, D]
    statistics: Any  # [programs, 2, rows]: of z
    scale: Any  # [D], of the norm
    shift: Any  # [D]
    w: Any  # [D, columns], of keys or of values
    b: Any  # [columns]
    out: Any  # out, float32 [rows, columns]
    new_statistics: Any  # out, [2, rows]: of this program's columns


# As above, without an activation; it leaves statistics for the k-norm, which the
# attention of the next position applies.
def _pair_kernel(refs: _PairRefs, *, kind, eps, folded, columns_read, depth):
    moments = read_statistics(
        refs.statistics, width=refs.z.shape[2], columns=columns_read, kind=kind, eps=eps
    )
    at = Position(refs.first, refs.behind).slot(refs.z)
    norm = None if folded else (refs.scale, refs.shift)
    (pairs,) = _normed_dots(refs.z, at, moments, norm, (refs.w,), depth)
    pairs = pairs + refs.b[...][None, :]
    refs.out[:] = pairs
    write_statistics(refs.new_statistics, pairs)


def _normed_dots(x_ref, at, moments, norm_refs, w_refs, depth):
    """Returns n(x[at]) w for each of `w_refs`.

    Args:
      norm_refs: scale and shift; None: the weights have them, and nothing is subtracted
        from a row, so that its factor multiplies the sum.
    """
    subtracted, factor = moments

    def add_rows(k, totals):
        part = pl.ds(k * depth, depth)
        rows = x_ref[at, :, part]
        return tuple(
            total + dot(rows, w_ref[part, :])
            for total, w_ref in zip(totals, w_refs, strict=True)
        )

    def add_normed(k, totals):
        scale_ref, shift_ref = norm_refs
        part = pl.ds(k * depth, depth)
        n = (x_ref[at, :, part] - subtracted[:, None]) * factor[:, None]
        n = n * scale_ref[part][None, :] + shift_ref[part][None, :]
        n = n.astype(w_refs[0].dtype)
        return tuple(
            total + dot(n, w_ref[part, :])
            for total, w_ref in zip(totals, w_refs, strict=True)
        )

    shape = (x_ref.shape[1], w_refs[0].shape[1])
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in w_refs)
    add = add_rows if norm_refs is None else add_normed
    totals = jax.lax.fori_loop(0, x_ref.shape[2] // depth, add, zeros)
    if norm_refs is not None:
        return totals
    return tuple(total * factor[:, None] for total in totals)


def _own_columns(l, i, j):
    return (l, 0, i, j)
