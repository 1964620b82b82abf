"""GPU path: Pallas kernels lowered by Triton, a few channels of a row a program.

A program walks its row's positions in order. The state [N, channels] stays in registers
with a channel's N values in one thread, so that the sum over n needs no other thread.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.selective_scan.call import (
    Scanned,
    SelectiveScanCall,
    refusal_of_arrays,
)
from pallas_kernels.selective_scan.triton_kernels import (
    backward_kernel,
    forward_kernel,
)
from pallas_kernels.selective_scan.triton_launch import (
    Arrays,
    Launch,
    choose_tiles,
    launch_kernel,
    refusal_of_tiles,
)
from pallas_kernels.target import refusal_of_triton

Array = jax.Array

_LONGEST_CHUNK = 32
_MOST_STATES = 32


def supported(call: SelectiveScanCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_triton() or refusal_of_one_position(call.u)
    return reason or expressible(call)


def expressible(call: SelectiveScanCall) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    reason = refusal_of_arrays(call)
    if reason is not None:
        return reason
    (I, N), chunk = call.a.shape, call.options.chunk
    if I % 16:
        return f"the channels must be a multiple of 16, got {I}"
    if N & (N - 1) or N > _MOST_STATES:
        return f"a channel's states must be 1, 2, 4, 8, 16 or 32, got {N}"
    if chunk > _LONGEST_CHUNK:
        return f"keeps a state every {_LONGEST_CHUNK} positions at least, got {chunk}"
    blocks = call.options.blocks
    if not blocks.given():
        return None
    tiles = choose_tiles(channels=I, chunk=chunk, blocks=blocks)
    return refusal_of_tiles(tiles, channels=I, chunk=chunk)


def forward(
    call: SelectiveScanCall, *, residuals: bool
) -> tuple[Scanned, Float[Array, "B G N I"] | None]:
    """Returns (y, final), and the states [B, G, N, I] that enter chunks or None."""
    launch = Launch.of(call, backward=False)
    B, N, I, G = launch.B, launch.N, launch.I, launch.chunks
    out_shape = [
        jax.ShapeDtypeStruct((B * launch.T, I), call.u.dtype),
        jax.ShapeDtypeStruct((B * N, I), jnp.float32),
    ]
    if residuals:
        out_shape.append(jax.ShapeDtypeStruct((B * G * N, I), jnp.float32))
    arrays = Arrays.of(call)
    y, final, *states = launch_kernel(launch, forward_kernel, arrays, (), out_shape)
    final = final.reshape(B, N, I).swapaxes(1, 2)
    out = Scanned(y.reshape(call.u.shape), final)
    return out, states[0].reshape(B, G, N, I) if states else None


def backward(
    call: SelectiveScanCall, residuals: Float[Array, "B G N I"], cotangents: Scanned
) -> SelectiveScanCall:
    """Returns gradients in place of the arrays."""
    launch, arrays = Launch.of(call, backward=True), Arrays.of(call)
    B, T, N, I = launch.B, launch.T, launch.N, launch.I
    more = (
        residuals.reshape(-1, I),
        cotangents.y.reshape(-1, I),
        cotangents.final.astype(jnp.float32).swapaxes(1, 2).reshape(-1, I),
    )
    wide = jax.ShapeDtypeStruct
    du, ddt, dz = (wide((B * T, I), x.dtype) for x in (arrays.u, arrays.dt, arrays.z))
    db = dc = wide((launch.columns * B * T, N), jnp.float32)
    da = d_initial = wide((B * N, I), jnp.float32)
    d_skip = d_bias = wide((B, I), jnp.float32)
    out_shape = [du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias]
    du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias = launch_kernel(
        launch, backward_kernel, arrays, more, out_shape
    )
    db, dc = (x.reshape(-1, B, T, N).sum(axis=0) for x in (db, dc))
    return call._replace(
        u=du.reshape(B, T, I),
        dt=ddt.reshape(B, T, I),
        a=da.reshape(B, N, I).sum(axis=0).T,
        b=db,
        c=dc,
        skip=d_skip.sum(axis=0),
        z=dz.reshape(B, T, I),
        dt_bias=d_bias.sum(axis=0),
        initial=d_initial.reshape(B, N, I).swapaxes(1, 2),
        starts=None,
    )
