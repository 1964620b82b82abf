"""TPU path: one kernel a pass; the state stays in VMEM from block to block.

Channels lie along the lanes, a channel's N states along the sublanes. b and c come
transposed, [B, N, T]: a position's weights are then a column that is rolled into the
first lane and spread over all channels. What has no past (softplus, the gate, D u) is
computed for a whole block of positions at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Bool, Float

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.selective_scan import operands
from pallas_kernels.selective_scan.block_sizes import BlockSizes, choose
from pallas_kernels.selective_scan.mosaic_kernels import (
    backward_kernel,
    forward_kernel,
)
from pallas_kernels.selective_scan.mosaic_launch import (
    LANES,
    ROWS,
    Arrays,
    Call,
    choose_tiles,
    launch,
    refusal_of_tiles,
    whole_lanes,
)
from pallas_kernels.target import refusal_of_mosaic_tpu

Array = jax.Array

_MOST_STATES = 32


def supported(u, *arrays, **options) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_mosaic_tpu() or refusal_of_one_position(u)
    return reason or expressible(u, *arrays, **options)


def expressible(
    u, dt, a, b, c, skip, z, dt_bias, initial, starts, *, chunk, blocks=None
) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    del initial
    reason = operands.refusal(u, dt, b, c, skip, z, dt_bias)
    if reason is not None:
        return reason
    I, N = a.shape
    if N % 8 or N > _MOST_STATES:
        return f"a channel's states must be 8, 16, 24 or 32, got {N}"
    if ROWS % chunk or chunk > _MOST_STATES:
        return f"keeps a state every 1, 2, 4, 8, 16 or 32 positions, got {chunk}"
    blocks = choose("mosaic_tpu", u, a, starts, chunk=chunk, blocks=blocks)
    reason = blocks.refusal_beyond("channels", "unroll")
    if reason is not None or not blocks.given():
        return reason
    sizes = {"channels": I + -I % LANES, "chunk": chunk}
    tiles = choose_tiles(**sizes, blocks=blocks)
    return refusal_of_tiles(tiles, **sizes, states=N, itemsize=u.dtype.itemsize)


def forward(
    u: Float[Array, "B T I"],
    dt: Float[Array, "B T I"],
    a: Float[Array, "I N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    skip: Float[Array, " I"],
    z: Float[Array, "B T I"],
    dt_bias: Float[Array, " I"],
    initial: Float[Array, "B I N"],
    starts: Bool[Array, "B T"] | None,
    *,
    chunk: int,
    residuals: bool,
    interpret: Any = False,
    blocks: BlockSizes | None = None,
):
    """Returns (y, final, states [B, G, N, I] that enter chunks) or None for these.

    Args:
      interpret: False, True, or pltpu.InterpretParams for the TPU's own semantics.
      blocks: sizes; None: measured ones; what is None in them is the heuristic's.
    """
    I = u.shape[2]
    blocks = choose("mosaic_tpu", u, a, starts, chunk=chunk, blocks=blocks)
    arrays = Arrays.of(u, dt, a, b, c, skip, z, dt_bias, initial, starts)
    call = Call.of(arrays, chunk, interpret, blocks)
    state = jax.ShapeDtypeStruct(arrays.initial.shape, jnp.float32)
    out_shape = [jax.ShapeDtypeStruct(arrays.u.shape, u.dtype), state]
    out_specs = [call.rows_spec(), call.state_spec()]
    if residuals:
        shape = (call.B, call.chunks, call.N, call.I)
        out_shape.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        out_specs.append(call.kept_spec())
    y, final, *kept = launch(
        call,
        forward_kernel,
        *arrays.given(),
        in_specs=call.specs(arrays),
        out_specs=out_specs,
        out_shape=out_shape,
        scratch=[call.state, call.rows, call.rows, call.rows],
    )
    final = final.swapaxes(1, 2)[:, :I]
    return y[..., :I], final, kept[0][..., :I] if kept else None


def backward(
    u: Float[Array, "B T I"],
    dt: Float[Array, "B T I"],
    a: Float[Array, "I N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    skip: Float[Array, " I"],
    z: Float[Array, "B T I"],
    dt_bias: Float[Array, " I"],
    initial: Float[Array, "B I N"],
    starts: Bool[Array, "B T"] | None,
    kept: Float[Array, "B G N I"],
    d_out: Float[Array, "B T I"],
    d_final: Float[Array, "B I N"],
    *,
    chunk: int,
    interpret: Any = False,
    blocks: BlockSizes | None = None,
):
    """Returns gradients of the arrays before `starts`."""
    (_, T, I), N = u.shape, a.shape[1]
    blocks = choose("mosaic_tpu", u, a, starts, chunk=chunk, blocks=blocks)
    arrays = Arrays.of(u, dt, a, b, c, skip, z, dt_bias, initial, starts)
    call = Call.of(arrays, chunk, interpret, blocks)
    rows, state = call.rows_spec(reverse=True), call.state_spec()
    row = pl.BlockSpec((None, 1, call.channels), lambda n, j, k: (n, 0, j))
    part = pl.BlockSpec(
        (None, None, N, ROWS), lambda n, j, k: (j, n, 0, call.blocks - 1 - k)
    )
    wide = jax.ShapeDtypeStruct
    of_shared = wide((call.columns, *arrays.b.shape), jnp.float32)
    of_state = wide(arrays.initial.shape, jnp.float32)
    of_row = wide((call.B, 1, call.I), jnp.float32)
    of_chunk = (chunk, N, call.channels)
    du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias = launch(
        call,
        backward_kernel,
        *arrays.given(),
        whole_lanes(kept),
        whole_lanes(d_out),
        whole_lanes(d_final.astype(jnp.float32).swapaxes(1, 2)),
        in_specs=[
            *call.specs(arrays, reverse=True),
            *(call.kept_spec(reverse=True), rows, state),
        ],
        out_specs=[rows, rows, rows, part, part, state, state, row, row],
        out_shape=[
            *(wide(arrays.u.shape, x.dtype) for x in (u, dt, z)),
            *(of_shared, of_shared, of_state, of_state, of_row, of_row),
        ],
        scratch=[call.state, *[call.rows] * 6, of_chunk, of_chunk, of_chunk],
    )
    db, dc = (x.sum(axis=0)[..., :T].swapaxes(1, 2) for x in (db, dc))
    return (
        *(du[..., :I], ddt[..., :I], da.sum(axis=0).T[:I], db, dc),
        *(d_skip.sum(axis=(0, 1))[:I], dz[..., :I], d_bias.sum(axis=(0, 1))[:I]),
        d_initial.swapaxes(1, 2)[:, :I],
    )
