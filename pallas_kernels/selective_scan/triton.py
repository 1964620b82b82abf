"""GPU path: Pallas kernels lowered by Triton, a few channels of a row a program.

A program walks its row's positions in order. The state [N, channels] stays in registers
with a channel's N values in one thread, so that the sum over n needs no other thread.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.selective_scan import operands
from pallas_kernels.selective_scan.block_sizes import BlockSizes, choose
from pallas_kernels.selective_scan.triton_kernels import (
    backward_kernel,
    forward_kernel,
)
from pallas_kernels.selective_scan.triton_launch import (
    Arrays,
    Call,
    choose_tiles,
    launch,
    refusal_of_tiles,
)
from pallas_kernels.target import refusal_of_triton

Array = jax.Array

_LONGEST_CHUNK = 32
_MOST_STATES = 32


def supported(u, *arrays, **options) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    reason = refusal_of_triton() or refusal_of_one_position(u)
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
    if I % 16:
        return f"the channels must be a multiple of 16, got {I}"
    if N & (N - 1) or N > _MOST_STATES:
        return f"a channel's states must be 1, 2, 4, 8, 16 or 32, got {N}"
    if chunk > _LONGEST_CHUNK:
        return f"keeps a state every {_LONGEST_CHUNK} positions at least, got {chunk}"
    blocks = choose("triton", u, a, starts, chunk=chunk, blocks=blocks)
    if not blocks.given():
        return None
    tiles = choose_tiles(channels=I, chunk=chunk, blocks=blocks)
    return refusal_of_tiles(tiles, channels=I, chunk=chunk)


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
    interpret: bool = False,
    blocks: BlockSizes | None = None,
):
    """Returns (y, final, states [B, G, N, I] that enter chunks) or None for these.

    Args:
      interpret: runs the kernels as plain JAX, on any device.
      blocks: sizes; None: measured ones; what is None in them is the heuristic's.
    """
    blocks = choose("triton", u, a, starts, chunk=chunk, blocks=blocks)
    call = Call.of(u, a, chunk, interpret, blocks, backward=False)
    arrays = Arrays.of(u, dt, a, b, c, skip, z, dt_bias, initial, starts)
    B, N, I, G = call.B, call.N, call.I, call.chunks
    out_shape = [
        jax.ShapeDtypeStruct((B * call.T, I), u.dtype),
        jax.ShapeDtypeStruct((B * N, I), jnp.float32),
    ]
    if residuals:
        out_shape.append(jax.ShapeDtypeStruct((B * G * N, I), jnp.float32))
    y, final, *kept = launch(call, forward_kernel, arrays, (), out_shape)
    final = final.reshape(B, N, I).swapaxes(1, 2)
    return y.reshape(u.shape), final, kept[0].reshape(B, G, N, I) if kept else None


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
    interpret: bool = False,
    blocks: BlockSizes | None = None,
):
    """Returns gradients of the arrays before `starts`."""
    blocks = choose("triton", u, a, starts, chunk=chunk, blocks=blocks)
    call = Call.of(u, a, chunk, interpret, blocks, backward=True)
    arrays = Arrays.of(u, dt, a, b, c, skip, z, dt_bias, initial, starts)
    B, T, N, I = call.B, call.T, call.N, call.I
    more = (
        kept.reshape(-1, I),
        d_out.reshape(-1, I),
        d_final.astype(jnp.float32).swapaxes(1, 2).reshape(-1, I),
    )
    wide = jax.ShapeDtypeStruct
    parts = wide((call.columns * B * T, N), jnp.float32)
    state, row = wide((B * N, I), jnp.float32), wide((B, I), jnp.float32)
    out_shape = [
        *(wide((B * T, I), x.dtype) for x in (u, dt, z)),
        *(parts, parts, state, state, row, row),
    ]
    du, ddt, dz, db, dc, da, d_initial, d_skip, d_bias = launch(
        call, backward_kernel, arrays, more, out_shape
    )
    db, dc = (x.reshape(-1, B, T, N).sum(axis=0) for x in (db, dc))
    return (
        *(du.reshape(u.shape), ddt.reshape(u.shape)),
        *(da.reshape(B, N, I).sum(axis=0).T, db, dc, d_skip.sum(axis=0)),
        *(dz.reshape(u.shape), d_bias.sum(axis=0)),
        d_initial.reshape(B, N, I).swapaxes(1, 2),
    )
