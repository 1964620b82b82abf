"""Matrix products of a position's step on GPU, with norms and activation fused.

Arrays are [L, slots, B, width], slots of a tile or of all positions, and a kernel takes
the position; arrays that live for one position only have a single slot. A program of a
product owns `rows` rows and `columns` columns of one layer's result and keeps its
float32 accumulator in registers. With few rows D columns make few programs: those of a
block of the residual stream's result then share the contracted axis (`add_product`).
Operands cross memory once for each program that needs them: rows once per column
program, weights once per row program, both from L2 at the sizes of one layer. What
leaves a program is its part of the result and two statistics a row.

A program sees some columns of a row only, so norms pass row sums between kernels. A
product writes the mean of its columns and the sum of squared deviations, [L, programs,
2, B], the column programs rounded up to a power of two; the reader joins them (Chan,
Golub and LeVeque, 1979), so that nothing cancels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from pallas_kernels.powers import next_power
from pallas_kernels.recurrent_prefill.call import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import (
    PreparedWeights,
    activate_in_kernel,
)
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    Position,
    column_spec,
    dot,
    launch_kernel,
    like,
    one_slot,
    row_spec,
    slot_spec,
    vector_spec,
    warps_of,
    whole_spec,
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
      width: width of the full row.
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


Norm = tuple[Float[Array, "L D"], Float[Array, "L D"]]
"""Scale and shift."""


class Folded(NamedTuple):
    """Weights and biases of the products after the norms, with scale and shift in.

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
    def of(cls, wide: PreparedWeights, spec: LayerSpec) -> "Folded | None":
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
      columns_read: columns of the programs that wrote the statistics.
      folded: whether w_in and b_in have the norm's scale and shift, which are then
        not read.
    """
    spec, block = launch.spec, launch.tiles.rows
    L, B, D, F = w_in.shape[0], x.shape[2], x.shape[3], width
    gated = w_in.shape[2] != F
    columns = launch.columns(F, L * (B // block))
    if gated:
        # Two accumulators: in float32 with 128 rows 64 columns spill on 8.0.
        columns = min(columns, 64 if jnp.dtype(spec.dtype).itemsize < 4 else 32)
    up, gate = 0, F // columns if gated else 0
    (hidden,) = launch_kernel(
        launch,
        _hidden_kernel,
        *t,
        x,
        statistics,
        *norm,
        w_in,
        w_in,
        b_in,
        b_in,
        refs=_HiddenRefs,
        grid=(L, B // block, F // columns),
        in_specs=[
            POSITION,
            POSITION,
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
        *t,
        z,
        statistics,
        *norm,
        w_kv,
        b_kv,
        refs=_PairRefs,
        grid=(L, B // block, N // columns),
        in_specs=[
            POSITION,
            POSITION,
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
    """Returns the columns of a program of the pairs' product; keys fill full ones."""
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


class ColumnSplit(NamedTuple):
    """The division of an `add_product`'s result among programs.

    Attributes:
      columns: columns of one program.
      splits: parts of the contracted axis, each with its own programs.
    """

    columns: int
    splits: int

    @classmethod
    def of(cls, launch: Launch, w: Float[Array, "L N M"], batch: int) -> "ColumnSplit":
        """Chooses for a weight and padded rows."""
        L, N, M = w.shape
        return cls(*launch.split(M, N, L * (batch // launch.tiles.rows)))

    def none_finished(
        self, launch: Launch, w: Float[Array, "L N M"], batch: int
    ) -> Array:
        """Returns zero counters of finished programs, one per block of the result."""
        L, _, M = w.shape
        shape = (L, batch // launch.tiles.rows, M // self.columns)
        return jnp.zeros(shape, jnp.int32)


def add_product(
    launch: Launch,
    t: Position,
    rows: Float[Array, "L _ B N"],
    w: Float[Array, "L N M"],
    b: Float[Array, "L M"],
    residual: Float[Array, "L _ B M"],
    out: Float[Array, "L _ B M"],
    finished: Int[Array, "L row_blocks column_blocks"],
    split: ColumnSplit,
):
    """Writes out[t] = residual[t] + s (rows[t] w + b).

    Args:
      finished: `ColumnSplit.none_finished`, and after the first position what this
        returned.

    Returns:
      out; its row t once more, in the products' dtype, [L, 1, B, M]; its statistics;
      finished; the splits' sums, which nobody needs any more.
    """
    L, _, B, N = out.shape
    block, (columns, splits) = launch.tiles.rows, split
    slots = slot_spec(out, block, columns)
    count = pl.BlockSpec(finished.shape, lambda l, i, j, k: (0, 0, 0))
    # Where nothing is split there is nothing to add up.
    shape = (L, splits, B, N) if splits > 1 else (L, 1, 1, 1)
    sums = pl.BlockSpec((None, splits, block, columns), lambda l, i, j, k: (l, 0, i, j))
    if splits == 1:
        sums = pl.BlockSpec((None, 1, 1, 1), lambda l, i, j, k: (l, 0, 0, 0))
    return launch_kernel(
        launch,
        _add_product_kernel,
        *t,
        rows,
        w,
        b,
        residual,
        out,
        finished,
        refs=_AddRefs,
        grid=(L, B // block, N // columns, splits),
        in_specs=[
            POSITION,
            POSITION,
            row_spec(rows, block),
            column_spec(w, columns),
            vector_spec(columns),
            slot_spec(residual, block, columns),
            slots,
            count,
        ],
        out_specs=[
            slots,
            pl.BlockSpec((None, None, block, columns), lambda l, i, j, k: (l, 0, i, j)),
            write_spec(block),
            count,
            sums,
        ],
        out_shape=[
            like(out),
            jax.ShapeDtypeStruct((L, 1, B, N), launch.spec.dtype),
            shape_of_statistics(L, N // columns, B),
            like(finished),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        aliases={6: 0, 7: 3},
        reads={2: one_slot(rows), 5: one_slot(residual)},
        # Write the splits' sums and read them again.
        writes={0: one_slot(out), 4: 2.0 if splits > 1 else 0.0},
        warps=warps_of(block, columns),
        stages=launch.stages(columns),
        scale=launch.spec.residual_scale,
        depth=launch.depth(w.shape[1]),
        splits=splits,
        # jax's interpreter runs programs one by one and knows no barrier.
        interpret=launch.interpret,
    )


class _AddRefs(NamedTuple):
    """References of `_add_product_kernel`."""

    first: Any  # [1], [1]: the position
    behind: Any
    rows: Any  # [positions, rows, N]
    w: Any  # [N, columns]
    b: Any  # [columns]
    residual: Any  # [positions, rows, columns]
    old_out: Any  # two outputs, which are written in place
    old_finished: Any
    out: Any  # [positions, rows, columns]
    narrow: Any  # [rows, columns]
    statistics: Any  # [2, rows]: of this program's columns
    finished: Any  # [L, row_blocks, column_blocks]: programs done, at all positions
    sums: Any  # [splits, rows, columns], float32


# A program reads its part of the contracted axis of its rows and of its columns of w,
# `depth` at a time. The last of the programs of one block of the result adds up what
# the others left, and its part of the residual. It waits for none: which one is last, a
# counter tells, raised once a part's sum is written.
def _add_product_kernel(refs: _AddRefs, *, scale, depth, splits, interpret):
    t = Position(refs.first, refs.behind)
    at = t.slot(refs.rows)
    steps = refs.w.shape[0] // (splits * depth)
    first = pl.program_id(3) * steps

    def add(k, total):
        part = pl.ds((first + k) * depth, depth)
        return total + dot(refs.rows[at, :, part], refs.w[part, :])

    zero = jnp.zeros((refs.rows.shape[1], refs.w.shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, steps, add, zero)

    def finish(total):
        total = total + refs.b[...][None, :]
        out = refs.residual[t.slot(refs.residual)] + scale * total
        refs.out[t.slot(refs.out)] = out
        refs.narrow[:] = out.astype(refs.narrow.dtype)
        write_statistics(refs.statistics, out)

    if splits == 1:
        finish(total)
        return
    refs.sums[pl.program_id(3)] = total
    # Every thread's part of the sum is written before one of them counts it.
    if not interpret:
        pltriton.debug_barrier()
    block = tuple(pl.program_id(axis) for axis in range(3))
    # A constant is more than jax's interpreter takes here.
    increment = 1 + jnp.minimum(pl.program_id(3), 0)
    before = pltriton.atomic_add(refs.finished, block, increment)

    @pl.when(before % splits == splits - 1)
    def _():
        # In the order of the splits, whoever is last: results do not change from run
        # to run.
        finish(
            jax.lax.fori_loop(0, splits, lambda k, total: total + refs.sums[k], zero)
        )
