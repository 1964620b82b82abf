"""The products that add to the residual stream, whose programs share long sums.

With few rows D columns make few programs: those of a block of the result then share the
contracted axis. Arrays and statistics are as in `products.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.arrays import Array
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
)
from pallas_kernels.recurrent_prefill.triton.norms import (
    shape_of_statistics,
    write_spec,
    write_statistics,
)


class Split(NamedTuple):
    """How the programs of an `add_product` share its result.

    Attributes:
      columns: of one program.
      splits: of the contracted axis; each has programs of its own.
    """

    columns: int
    splits: int

    @classmethod
    def of(cls, launch: Launch, w: Float[Array, "L N M"], batch: int) -> "Split":
        """Chooses for a weight and padded rows."""
        L, N, M = w.shape
        return cls(*launch.split(M, N, L * (batch // launch.tiles.rows)))

    def none_finished(
        self, launch: Launch, w: Float[Array, "L N M"], batch: int
    ) -> Array:
        """Returns how many programs of each block of the result are done: none."""
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
    split: Split,
):
    """Writes out[t] = residual[t] + s (rows[t] w + b).

    Args:
      finished: `Split.none_finished`, and after the first position what this returned.

    Returns:
      out; its row t once more, in the products' dtype, [L, 1, B, M]; its statistics;
      finished; the splits' sums, which nobody needs any more.
    """
    L, _, B, N = out.shape
    block, (columns, splits) = launch.tiles.rows, split
    own = slot_spec(out, block, columns)
    count = pl.BlockSpec(finished.shape, lambda l, i, j, k: (0, 0, 0))
    # Where nothing is split there is nothing to add up.
    shape = (L, splits, B, N) if splits > 1 else (L, 1, 1, 1)
    sums = pl.BlockSpec((None, splits, block, columns), lambda l, i, j, k: (l, 0, i, j))
    if splits == 1:
        sums = pl.BlockSpec((None, 1, 1, 1), lambda l, i, j, k: (l, 0, 0, 0))
    return launch_kernel(
        launch,
        _add_product_kernel,
        *(*t, rows, w, b, residual, out, finished),
        refs=_AddRefs,
        grid=(L, B // block, N // columns, splits),
        in_specs=[
            *(POSITION, POSITION),
            row_spec(rows, block),
            column_spec(w, columns),
            vector_spec(columns),
            slot_spec(residual, block, columns),
            *(own, count),
        ],
        out_specs=[
            own,
            pl.BlockSpec((None, None, block, columns), lambda l, i, j, k: (l, 0, i, j)),
            write_spec(block),
            *(count, sums),
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
        # The splits' sums are written, and read again.
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
    one = 1 + jnp.minimum(pl.program_id(3), 0)
    before = pltriton.atomic_add(refs.finished, block, one)

    @pl.when(before % splits == splits - 1)
    def _():
        # In the order of the splits, whoever is last: results do not change from run
        # to run.
        finish(
            jax.lax.fori_loop(0, splits, lambda k, total: total + refs.sums[k], zero)
        )
