"""The products of a position's step backward; the forward ones are in `products`.

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
    slot,
    slot_spec,
    warps_of,
    whole_spec,
)
from pallas_kernels.recurrent_prefill.triton.norms import standardised_back


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
    dk: Float[Array, "L b B KE"],
    dv: Float[Array, "L b B KE"],
    sums: Float[Array, "L programs 2 B"],
    unit_k: Float[Array, "L b B KE"],
    factor: Float[Array, "L b B"],
    scale: Float[Array, "L KE"],
    w: Float[Array, "L D KE_and_KE"],
    out: Float[Array, "L b B D"],
) -> Float[Array, "L b B D"]:
    """Writes out[t] = [k-norm back (dk[t]) | dv[t]] [W_k | W_v]^T.

    Args:
      sums: of scale dk unit_k and of scale dk by head, [L, programs, 2, B].
      unit_k: normalised keys before the k-norm's scale, [L, b, B, K E].
      factor: what the k-norm multiplied by, [L, b, B].
    """
    spec, block = launch.spec, launch.tiles.rows
    L, b, B, D = out.shape
    KE = unit_k.shape[3]
    columns = launch.columns(D, L * (B // block))
    # In float32 what it reads ahead, two blocks of a weight among it, leaves a frame on
    # the stack of 12.0 at a depth of 32.
    deepest = KE if w.dtype.itemsize < 4 else 16
    own = slot_spec(out, block, columns)
    (out,) = launch_kernel(
        launch,
        _pair_product_back_kernel,
        *(t, dk, dv, sums, unit_k, factor, scale, w, out),
        refs=_PairBackRefs,
        grid=(L, B // block, D // columns),
        in_specs=[
            POSITION,
            *(row_spec(dk, block), row_spec(dv, block)),
            pl.BlockSpec((None, sums.shape[1], 2, block), lambda l, i, j: (l, 0, 0, i)),
            row_spec(unit_k, block),
            pl.BlockSpec((None, b, block), lambda l, i, j: (l, 0, i)),
            whole_spec(KE),
            pl.BlockSpec((None, columns, 2 * KE), lambda l, i, j: (l, j, 0)),
            own,
        ],
        out_specs=[own],
        out_shape=[like(out)],
        aliases={8: 0},
        reads=dict.fromkeys((1, 2, 4, 5), one_slot(out)),
        writes={0: one_slot(out)},
        warps=8 if block > 32 else 4,
        stages=2,
        kind=spec.qk_norm,
        heads=spec.key_heads,
        depth=min(launch.depth(KE), deepest),
    )
    return out


# A program owns rows x columns of one layer's product, its accumulator in registers.
def _transposed_product_kernel(t_ref, rows_ref, w_ref, *refs, parts, depth):
    t = t_ref[0]
    at = slot(rows_ref, t)
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
    dk: Any  # [b, rows, K E]
    dv: Any  # [b, rows, K E]
    sums: Any  # [programs, 2, rows]: what heads left for the k-norm
    unit: Any  # [b, rows, K E]: keys before the k-norm's scale
    factor: Any  # [b, rows]: what the k-norm multiplied by
    scale: Any  # [K E], of the k-norm
    w: Any  # [columns, 2 K E]: w_k, then w_v
    before: Any  # the array that `out` is written into; not read
    out: Any  # out, [b, rows, columns]


# As above; the k-norm's backward is applied to the keys' cotangent as it is read.
def _pair_product_back_kernel(refs: _PairBackRefs, *, kind, heads, depth):
    t = refs.t[0]
    KE = refs.dk.shape[2]
    # What each head left of the two sums over all keys; the rest of the array, up to a
    # power of two, was never written.
    programs, _, rows = refs.sums.shape
    written = jax.lax.broadcasted_iota(jnp.int32, (programs, rows), 0) < heads
    along = jnp.sum(jnp.where(written, refs.sums[:, 0, :], 0.0), axis=0) / KE
    level = jnp.sum(jnp.where(written, refs.sums[:, 1, :], 0.0), axis=0) / KE
    factor = refs.factor[t]

    def add(k, total):
        part = pl.ds(k * depth, depth)
        g = refs.dk[t, :, part] * refs.scale[part][None, :]
        g = standardised_back(
            g, refs.unit[t, :, part], factor, along, level, kind
        ).astype(refs.w.dtype)
        total = total + dot(g, refs.w[:, part].T)
        values = pl.ds(KE + k * depth, depth)
        v = refs.dv[t, :, part].astype(refs.w.dtype)
        return total + dot(v, refs.w[:, values].T)

    zero = jnp.zeros((rows, refs.w.shape[0]), jnp.float32)
    refs.out[t] = jax.lax.fori_loop(0, KE // depth, add, zero)


def shape_of_sums(layers: int, heads: int, batch: int) -> tuple[int, ...]:
    """Returns the shape of the two sums a head leaves for the k-norm's backward."""
    return (layers, next_power(heads), 2, batch)
