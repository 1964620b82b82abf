"""TPU path: one kernel a pass; the state stays in VMEM from block to block.

Channels lie along the lanes, a channel's N states along the sublanes. b and c come
transposed, [B, N, T]: a position's weights are then a column that is rolled into the
first lane and spread over all channels. What has no past (softplus, the gate, D u) is
computed for a whole block of positions at once.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.selective_scan.call import (
    Scanned,
    SelectiveScanCall,
    refusal_of_arrays,
)
from pallas_kernels.selective_scan.mosaic_kernels import (
    backward_kernel,
    forward_kernel,
)
from pallas_kernels.selective_scan.mosaic_launch import (
    LANES,
    ROWS,
    Arrays,
    Launch,
    choose_tiles,
    launch_kernel,
    refusal_of_tiles,
    whole_lanes,
)
from pallas_kernels.target import refusal_of_mosaic_tpu

Array = jax.Array

_MOST_STATES = 32


def supported(call: SelectiveScanCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_mosaic_tpu() or refusal_of_one_position(call.u)
    return reason or expressible(call)


def expressible(call: SelectiveScanCall) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    reason = refusal_of_arrays(call)
    if reason is not None:
        return reason
    (I, N), chunk = call.a.shape, call.options.chunk
    if N % 8 or N > _MOST_STATES:
        return f"a channel's states must be 8, 16, 24 or 32, got {N}"
    if ROWS % chunk or chunk > _MOST_STATES:
        return f"keeps a state every 1, 2, 4, 8, 16 or 32 positions, got {chunk}"
    blocks = call.options.blocks
    reason = blocks.refusal_beyond("channels", "unroll")
    if reason is not None or not blocks.given():
        return reason
    sizes = {"channels": I + -I % LANES, "chunk": chunk}
    tiles = choose_tiles(**sizes, blocks=blocks)
    return refusal_of_tiles(tiles, **sizes, states=N, itemsize=call.u.dtype.itemsize)


def forward(
    call: SelectiveScanCall, *, residuals: bool
) -> tuple[Scanned, Float[Array, "B G N I"] | None]:
    """Returns (y, final), and the states [B, G, N, I] that enter chunks or None."""
    arrays, I = Arrays.of(call), call.u.shape[2]
    launch = Launch.of(arrays, call)
    state = jax.ShapeDtypeStruct(arrays.initial.shape, jnp.float32)
    out_shape = [jax.ShapeDtypeStruct(arrays.u.shape, call.u.dtype), state]
    out_specs = [launch.rows_spec(), launch.state_spec()]
    if residuals:
        shape = (launch.B, launch.chunks, launch.N, launch.I)
        out_shape.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        out_specs.append(launch.kept_spec())
    y, final, *states = launch_kernel(
        launch,
        forward_kernel,
        *arrays.given(),
        in_specs=launch.specs(arrays),
        out_specs=out_specs,
        out_shape=out_shape,
        scratch=[launch.state, launch.rows, launch.rows, launch.rows],
    )
    out = Scanned(y[..., :I], final.swapaxes(1, 2)[:, :I])
    return out, states[0][..., :I] if states else None


def backward(
    call: SelectiveScanCall, residuals: Float[Array, "B G N I"], cotangents: Scanned
) -> SelectiveScanCall:
    """Returns gradients in place of the arrays."""
    (_, T, I), N = call.u.shape, call.a.shape[1]
    arrays = Arrays.of(call)
    launch = Launch.of(arrays, call)
    rows, state = launch.rows_spec(reverse=True), launch.state_spec()
    row = pl.BlockSpec((None, 1, launch.channels), lambda n, j, k: (n, 0, j))
    part = pl.BlockSpec(
        (None, None, N, ROWS), lambda n, j, k: (j, n, 0, launch.blocks - 1 - k)
    )
    wide = jax.ShapeDtypeStruct
    du, ddt, dz = (wide(x.shape, x.dtype) for x in (arrays.u, arrays.dt, arrays.z))
    db = dc = wide((launch.columns, *arrays.b.shape), jnp.float32)
    da = d_initial = wide(arrays.initial.shape, jnp.float32)
    d_skip = d_bias = wide((launch.B, 1, launch.I), jnp.float32)
    of_chunk = (launch.chunk, N, launch.channels)
    du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias = launch_kernel(
        launch,
        backward_kernel,
        *arrays.given(),
        whole_lanes(residuals),
        whole_lanes(cotangents.y),
        whole_lanes(cotangents.final.astype(jnp.float32).swapaxes(1, 2)),
        in_specs=[
            *launch.specs(arrays, reverse=True),
            launch.kept_spec(reverse=True),
            rows,
            state,
        ],
        out_specs=[rows, rows, rows, part, part, state, state, row, row],
        out_shape=[du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias],
        scratch=[launch.state, *[launch.rows] * 6, of_chunk, of_chunk, of_chunk],
    )
    db, dc = (x.sum(axis=0)[..., :T].swapaxes(1, 2) for x in (db, dc))
    return call._replace(
        u=du[..., :I],
        dt=ddt[..., :I],
        a=da.sum(axis=0).T[:I],
        b=db,
        c=dc,
        skip=d_skip.sum(axis=(0, 1))[:I],
        z=dz[..., :I],
        dt_bias=d_bias.sum(axis=(0, 1))[:I],
        initial=d_initial.swapaxes(1, 2)[:, :I],
        starts=None,
    )
