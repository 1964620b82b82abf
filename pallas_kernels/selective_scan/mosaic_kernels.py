"""The TPU kernels: both passes of a row's block of channels, block after block."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.selective_scan.mosaic_launch import ROWS, Arrays, Launch

Array = jax.Array


# A program owns a row and a block of channels; the grid walks the row's blocks of 128
# positions in order, the state waits in VMEM between them. Crossing HBM: u, dt, z and y
# once, b and c once a block of channels, and a state of every chunk where it is kept.
def forward_kernel(*refs, launch: Launch):
    """Writes y, the last state and, where there is a place for them, kept states."""
    ins, (y_ref, final_ref, *rest) = _split(refs, launch)
    *kept_ref, h_ref, delta_rows, input_rows, y_rows = rest
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _():
        h_ref[:] = ins.initial[...]

    u, _ = _read_steps(launch, ins, block, delta_rows, input_rows)
    a, b, c = ins.a[...], ins.b[...], ins.c[...]

    def position(s, h):
        delta, x = delta_rows[pl.ds(s, 1), :], input_rows[pl.ds(s, 1), :]
        h = _decay(ins, delta, a, s) * h + _column(b, s) * x
        y_rows[pl.ds(s, 1), :] = jnp.sum(h * _column(c, s), axis=0, keepdims=True)
        return h

    def one_chunk(p, h):
        for ref in kept_ref:
            ref[p] = h
        return _walk(launch, p, position, h)

    h = jax.lax.fori_loop(0, launch.chunks_of_block, one_chunk, h_ref[...])
    h_ref[:] = h
    z = ins.z[...].astype(jnp.float32)
    y = y_rows[: launch.positions, :] + ins.skip[...] * u
    y_ref[:] = (y * z * jax.nn.sigmoid(z)).astype(y_ref.dtype)

    @pl.when(block == launch.blocks - 1)
    def _():
        final_ref[:] = h


# The same programs, blocks and chunks from last to first. A chunk is first walked
# forward from its kept state, its states and decays stay in VMEM, and then back; the
# gradient of the state waits in VMEM between blocks. Crossing HBM: u, dt, z, dy and
# their gradients once, kept states once, b and c and a part of their gradients once a
# block of channels.
def backward_kernel(*refs, launch: Launch):
    """Writes the gradients of everything; of b and c one block of channels' part."""
    ins, rest = _split(refs, launch)
    kept_ref, d_out_ref, d_final_ref, du_ref, ddt_ref, dz_ref, *rest = rest
    db_ref, dc_ref, da_ref, d_initial_ref, d_skip_ref, d_bias_ref, *rest = rest
    dh_ref, delta_rows, input_rows, dy_rows, y_rows, *rest = rest
    of_input_rows, of_step_rows, before_ref, after_ref, decay_ref = rest
    turn = pl.program_id(2)
    block = launch.blocks - 1 - turn

    @pl.when(turn == 0)
    def _():
        dh_ref[:] = d_final_ref[...]
        for ref in (da_ref, d_skip_ref, d_bias_ref):
            ref[:] = jnp.zeros_like(ref)

    u, raw = _read_steps(launch, ins, block, delta_rows, input_rows)
    z, d_out = (_read_rows(launch, ref, block) for ref in (ins.z, d_out_ref))
    sigmoid = jax.nn.sigmoid(z)
    dy = d_out * z * sigmoid
    _write_rows(launch, dy_rows, dy)
    a, b, c = ins.a[...], ins.b[...], ins.c[...]
    lane = jax.lax.broadcasted_iota(jnp.int32, (launch.N, ROWS), 1)

    def again(s, carry):
        h, dc = carry
        delta, x = delta_rows[pl.ds(s, 1), :], input_rows[pl.ds(s, 1), :]
        i, decay = jax.lax.rem(s, launch.chunk), _decay(ins, delta, a, s)
        before_ref[i], decay_ref[i] = h, decay
        h = decay * h + _column(b, s) * x
        after_ref[i] = h
        y_rows[pl.ds(s, 1), :] = jnp.sum(h * _column(c, s), axis=0, keepdims=True)
        column = jnp.sum(h * dy_rows[pl.ds(s, 1), :], axis=1, keepdims=True)
        return h, jnp.where(lane == s, column, dc)

    def back(s, carry):
        dh, da, db = carry
        i = jax.lax.rem(s, launch.chunk)
        delta, x = delta_rows[pl.ds(s, 1), :], input_rows[pl.ds(s, 1), :]
        g = dh + _column(c, s) * dy_rows[pl.ds(s, 1), :]
        column = jnp.sum(g * x, axis=1, keepdims=True)
        of_input = jnp.sum(g * _column(b, s), axis=0, keepdims=True)
        of_input_rows[pl.ds(s, 1), :] = of_input
        dh = decay_ref[i] * g
        d_exponent = dh * before_ref[i]
        of_step_rows[pl.ds(s, 1), :] = jnp.sum(d_exponent * a, axis=0, keepdims=True)
        return dh, da + d_exponent * delta, jnp.where(lane == s, column, db)

    here = _chunks_here(launch, block)

    def one_chunk(n, carry):
        dh, da, db, dc = carry
        p = here - 1 - n
        _, dc = _walk(launch, p, again, (kept_ref[p], dc))
        dh, da, db = _walk(launch, p, back, (dh, da, db), reverse=True)
        return dh, da, db, dc

    none = jnp.zeros((launch.N, ROWS), jnp.float32)
    carry = (dh_ref[...], da_ref[...], none, none)
    dh, da, db, dc = jax.lax.fori_loop(0, here, one_chunk, carry)
    dh_ref[:], da_ref[:], db_ref[:], dc_ref[:] = dh, da, db, dc
    positions = slice(launch.positions)
    delta, of_input = delta_rows[positions, :], of_input_rows[positions, :]
    du = delta * of_input + ins.skip[...] * dy
    # Past the row's end nothing was written: what lies there is no gradient.
    inside = _inside(launch, block)
    ddt = jnp.where(
        inside,
        (u * of_input + of_step_rows[positions, :]) * jax.nn.sigmoid(raw),
        0.0,
    )
    y = y_rows[positions, :] + ins.skip[...] * u
    dz = d_out * y * sigmoid * (1 + z * (1 - sigmoid))
    for ref, value in ((du_ref, du), (ddt_ref, ddt), (dz_ref, dz)):
        ref[:] = value.astype(ref.dtype)
    d_skip_ref[:] += jnp.sum(dy * u, axis=0, keepdims=True)
    d_bias_ref[:] += jnp.sum(ddt, axis=0, keepdims=True)

    @pl.when(turn == launch.blocks - 1)
    def _():
        d_initial_ref[:] = dh


def _split(refs, launch: Launch) -> tuple[Arrays, list]:
    count = len(Arrays._fields) - (not launch.has_starts)
    return Arrays(*refs[:count]), list(refs[count:])


def _read_steps(launch: Launch, ins: Arrays, block, delta_rows, input_rows):
    """Writes the block's steps s and s u, by position; returns (u, dt + bias)."""
    u = _read_rows(launch, ins.u, block)
    raw = _read_rows(launch, ins.dt, block) + ins.bias[...]
    # Past the row's end the step is 0: the state stays as it is.
    delta = jnp.where(_inside(launch, block), _softplus(raw), 0.0)
    _write_rows(launch, delta_rows, delta)
    _write_rows(launch, input_rows, delta * u)
    return u, raw


def _read_rows(launch: Launch, ref, block) -> Array:
    """Reads a block [rows, channels] in float32; zeros past the row's end."""
    return jnp.where(_inside(launch, block), ref[...].astype(jnp.float32), 0.0)


def _write_rows(launch: Launch, rows, value: Array) -> None:
    """Writes a block where single positions are read; zeros after a short row."""
    if launch.positions < ROWS:
        rows[:] = jnp.zeros_like(rows)
    rows[: launch.positions, :] = value


def _inside(launch: Launch, block) -> Array:
    shape = (launch.positions, launch.channels)
    t = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + block * ROWS
    return t < launch.T


def _chunks_here(launch: Launch, block) -> Array | int:
    """Returns how many chunks of the block there are: the last can have fewer."""
    here = launch.chunks_of_block
    if launch.chunks % here == 0:
        return here
    return jnp.minimum(here, launch.chunks - block * here)


def _walk(launch: Launch, p, position, carry, *, reverse: bool = False):
    """Runs `position` over chunk p of the block, from its last one if `reverse`."""
    C, U = launch.chunk, launch.unroll

    def group(m, carry):
        for i in range(U):
            s = m * U + i
            carry = position(p * C + (C - 1 - s if reverse else s), carry)
        return carry

    return jax.lax.fori_loop(0, C // U, group, carry)


def _decay(ins: Arrays, delta: Array, a: Array, s) -> Array:
    """Returns what is left of the state before position s, [N, channels]."""
    decay = jnp.exp(delta * a)
    return decay if ins.keep is None else decay * _column(ins.keep[...], s)


def _column(x: Array, s) -> Array:
    """Returns column s of [_, 128] as [_, 1]."""
    return pltpu.roll(x, jax.lax.rem(ROWS - s, ROWS), axis=1)[:, :1]


def _softplus(x: Array) -> Array:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
