"""The products of a position's step backward; see `products` and `add_product`.

Gradients of a tile are [L, b, B, width] and are written in place, slot by slot, so
that the weights' gradients can be formed for the whole tile at once.
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
    dot,
    launch_kernel,
    like,
    one_slot,
    row_spec,
    slot_of,
    slot_spec,
    vector_spec,
    warps_of,
)


def transposed_product(
    launch: Launch,
    t: Int[Array, "1"],
    rows: Float[Array, "L _ B M"],
    w: Float[Array, "L N M"],
    out: Float[Array, "L b B N_or_2N"],
    slopes: Float[Array, "L b B N_or_2N"] | None = None,
) -> Float[Array, "L b B N_or_2N"]:
    """Writes out[t] = rows[t] w^T, with w [L, N, M].

    Args:
      slopes: [L, b, B, p N]: out[t] is then p copies of the product side by side, times
        slopes[t].
    """
    L, _, B, width = out.shape
    N, M = w.shape[1:]
    block = launch.tiles.rows
    columns = launch.columns(N, L * (B // block))
    factors = () if slopes is None else (slopes,)
    own = row_spec(out, block)
    (out,) = launch_kernel(
        launch,
        _transposed_product_kernel,
        *(t, rows, w, *factors, out),
        grid=(L, B // block, N // columns),
        in_specs=[
            POSITION,
            row_spec(rows, block),
            pl.BlockSpec((None, columns, M), lambda l, i, j: (l, j, 0)),
            *(row_spec(part, block) for part in factors),
            own,
        ],
        out_specs=[own],
        out_shape=[like(out)],
        aliases={3 + len(factors): 0},
        reads={1: one_slot(rows)}
        | dict.fromkeys(range(3, 3 + len(factors)), one_slot(out)),
        writes={0: one_slot(out)},
        warps=warps_of(block, columns),
        parts=width // N,
        depth=launch.depth(M),
    )
    return out


def pair_product_back(
    launch: Launch,
    t: Int[Array, "1"],
    pair: Float[Array, "L 2 B KE"],
    sums: Float[Array, "L programs 2 B"],
    factor: Float[Array, "L b B"],
    w: Float[Array, "L D KE_and_KE"],
    turned: Float[Array, "L b B D"],
    level: Float[Array, "L D"],
    out: Float[Array, "L b B D"],
) -> Float[Array, "L b B D"]:
    """Writes out[t] = [k-norm back (dk[t]) | dv[t]] [W_k | W_v]^T.

    The k-norm's backward takes off each row its mean along the unit keys (and, of a
    layer norm, its mean): after the product that is a number a row times what W_k makes
    of the unit keys (and of ones), which the whole tile has at once.

    Args:
      pair: factor scale dk[t] and dv[t].
      sums: of scale dk unit_k and of scale dk by head, [L, programs, 2, B].
      factor: what the k-norm multiplied by, [L, b, B].
      turned: unit_k W_k^T, float32.
      level: sums of W_k over its columns.
    """
    spec, block = launch.spec, launch.tiles.rows
    L, b, B, D = out.shape
    KE = pair.shape[3]
    columns = launch.columns(D, L * (B // block))
    own = slot_spec(out, block, columns)
    (out,) = launch_kernel(
        launch,
        _pair_product_back_kernel,
        *(t, pair, sums, factor, w, turned, level, out),
        refs=_PairBackRefs,
        grid=(L, B // block, D // columns),
        in_specs=[
            POSITION,
            row_spec(pair, block),
            pl.BlockSpec((None, sums.shape[1], 2, block), lambda l, i, j: (l, 0, 0, i)),
            pl.BlockSpec((None, b, block), lambda l, i, j: (l, 0, i)),
            pl.BlockSpec((None, columns, 2 * KE), lambda l, i, j: (l, j, 0)),
            slot_spec(turned, block, columns),
            vector_spec(columns),
            own,
        ],
        out_specs=[own],
        out_shape=[like(out)],
        aliases={7: 0},
        reads=dict.fromkeys((3, 5), one_slot(out)),
        writes={0: one_slot(out)},
        warps=warps_of(block, columns),
        kind=spec.qk_norm,
        heads=spec.key_heads,
        depth=launch.depth(KE),
    )
    return out


# A program owns rows x columns of one layer's product, its accumulator in registers.
def _transposed_product_kernel(t_ref, rows_ref, w_ref, *refs, parts, depth):
    t = t_ref[0]
    at = slot_of(t, rows_ref.shape[0])
    out_ref = refs[-1]
    columns, M = w_ref.shape

    def add(k, total):
        part = pl.ds(k * depth, depth)
        return total + dot(rows_ref[at, :, part], w_ref[:, part].T)

    zero = jnp.zeros((rows_ref.shape[1], columns), jnp.float32)
    total = jax.lax.fori_loop(0, M // depth, add, zero)
    # With a gate the same product goes to both halves, each times its own slopes.
    N = out_ref.shape[2] // parts
    for part in range(parts):
        mine = pl.ds(part * N + pl.program_id(2) * columns, columns)
        value = total
        if len(refs) == 3:
            value = total * refs[0][t, :, mine].astype(jnp.float32)
        out_ref[t, :, mine] = value.astype(out_ref.dtype)


class _PairBackRefs(NamedTuple):
    """References of `_pair_product_back_kernel`."""

    t: Any  # int32 [1]: the position within the tile
    pair: Any  # [2, rows, K E]
    sums: Any  # [programs, 2, rows]: what heads left for the k-norm
    factor: Any  # [b, rows]: what the k-norm multiplied by
    w: Any  # [columns, 2 K E]: w_k, then w_v
    turned: Any  # [b, rows, columns]: w_k of the unit keys
    level: Any  # [columns]: w_k of ones
    before: Any  # the array that `out` is written into; not read
    out: Any  # out, [b, rows, columns]


# As above; what the k-norm's backward takes off comes after the product.
def _pair_product_back_kernel(refs: _PairBackRefs, *, kind, heads, depth):
    t = refs.t[0]
    KE = refs.pair.shape[2]

    def add(k, total):
        part, values = pl.ds(k * depth, depth), pl.ds(KE + k * depth, depth)
        total = total + dot(refs.pair[0, :, part], refs.w[:, part].T)
        return total + dot(refs.pair[1, :, part], refs.w[:, values].T)

    zero = jnp.zeros((refs.pair.shape[1], refs.w.shape[0]), jnp.float32)
    total = jax.lax.fori_loop(0, KE // depth, add, zero)
    if kind != "none":
        # What each head left of the two sums over all keys; the rest of the array, up
        # to a power of two, was never written.
        programs, _, rows = refs.sums.shape
        written = jax.lax.broadcasted_iota(jnp.int32, (programs, rows), 0) < heads
        mean = lambda n: (  # noqa: E731
            jnp.sum(jnp.where(written, refs.sums[:, n, :], 0.0), axis=0) / KE
        )
        factor = refs.factor[t]
        total = total - (factor * mean(0))[:, None] * refs.turned[t]
        if kind == "layer":
            total = total - (factor * mean(1))[:, None] * refs.level[...][None, :]
    refs.out[t] = total


def shape_of_sums(layers: int, heads: int, batch: int) -> tuple[int, ...]:
    """Returns the shape of the two sums a head leaves for the k-norm's backward."""
    return (layers, next_power(heads), 2, batch)
