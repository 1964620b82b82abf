"""TPU path: one kernel per pass; the state stays in VMEM from block to block.

Channels are along the lanes, a channel's N states along the sublanes. b and c come
transposed, [B, N, T]: a position's weights are then a column that is rolled into the
first lane and spread over all channels. What has no past (softplus, the gate, D u) is
computed for a full block of positions at once. From top to bottom: sizes and launch,
the kernels of both passes, the backend.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.selective_scan.call import (
    BlockSizes,
    SelectiveScanCall,
    SelectiveScanOutputs,
    refusal_of_arrays,
    refusal_of_unroll,
)
from pallas_kernels.target import LEAST_VMEM, refusal_of_mosaic_tpu

Array = jax.Array

LANES = 128
ROWS = LANES
"""Positions of a block: b and c have them along the lanes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The tiles of a call.

    Attributes:
      channels: channels of a program, a multiple of 128.
      unroll: positions in a turn of the kernel's loop.
    """

    channels: int
    unroll: int


def choose_tiles(
    *, channels: int, chunk: int, blocks: BlockSizes | None = None
) -> Tiles:
    """Returns the cut for I channels (a multiple of 128). Not tuned on a device.

    512 channels of 16 states are 8 registers a value.

    Args:
      blocks: sizes in place of these.
    """
    overrides = {} if blocks is None else blocks.given()
    groups = channels // LANES
    most = max(n for n in (1, 2, 3, 4) if groups % n == 0)
    sizes = {"channels": most * LANES, "unroll": min(chunk, 8)}
    return Tiles(**(sizes | overrides))


def refusal_of_tiles(
    tiles: Tiles, *, channels: int, states: int, chunk: int, itemsize: int
) -> str | None:
    """Returns why no TPU can run these sizes, None when one can.

    Args:
      channels: I, a multiple of 128.
      states: N.
      itemsize: bytes of a number of u.
    """
    width = tiles.channels
    if width % LANES or channels % width:
        return (
            f"channels must be a multiple of {LANES} that divides {channels}, got "
            f"{width}"
        )
    # What the backward pass takes: two buffers of seven blocks of positions, and of a
    # block's kept states, sums by position, and a chunk's states three times.
    needed = 2 * ROWS * width * 7 * itemsize + 2 * (ROWS // chunk) * states * width * 4
    needed += 4 * width * (6 * ROWS + 3 * chunk * states)
    if needed > LEAST_VMEM:
        return (
            f"channels={width} need {needed:,} bytes of VMEM, kernels may have "
            f"{LEAST_VMEM:,}"
        )
    return refusal_of_unroll("unroll", tiles.unroll, chunk)


class Arrays(NamedTuple):
    """The op's arrays as the kernels read them, or references to a program's blocks.

    As arrays I and, in b, c and keep, T are padded to multiples of 128, with zeros.
    """

    u: Any  # [B, T, I]; a block [rows, channels]
    dt: Any  # [B, T, I]; likewise
    a: Any  # [N, I]; [N, channels]
    b: Any  # [B, N, T]; [N, 128]
    c: Any  # [B, N, T]; [N, 128]
    skip: Any  # [1, I]; [1, channels]
    z: Any  # [B, T, I]; [rows, channels]
    bias: Any  # [1, I]; [1, channels]
    initial: Any  # [B, N, I]; [N, channels]
    keep: Any = None  # [B, 1, T], 0 where a document starts, else 1; [1, 128]

    @classmethod
    def of(cls, call: SelectiveScanCall) -> "Arrays":
        float32 = jnp.float32
        assert call.skip is not None and call.z is not None
        assert call.dt_bias is not None
        keep = None
        if call.starts is not None:
            keep = 1 - whole_lanes(call.starts.astype(float32))[:, None]
        return cls(
            u=whole_lanes(call.u),
            dt=whole_lanes(call.dt),
            a=whole_lanes(call.a.astype(float32).T),
            b=whole_lanes(call.b.astype(float32).swapaxes(1, 2)),
            c=whole_lanes(call.c.astype(float32).swapaxes(1, 2)),
            skip=whole_lanes(call.skip.astype(float32)[None]),
            z=whole_lanes(call.z),
            bias=whole_lanes(call.dt_bias.astype(float32)[None]),
            initial=whole_lanes(call.initial.astype(float32).swapaxes(1, 2)),
            keep=keep,
        )

    def given(self) -> list:
        """Returns those that the call has."""
        return [x for x in self if x is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that all kernels of a call share: sizes and tiles."""

    B: int
    T: int
    I: int
    N: int
    chunk: int
    channels: int
    unroll: int
    has_starts: bool
    interpret: Any

    @classmethod
    def of(cls, arrays: Arrays, call: SelectiveScanCall) -> "Launch":
        B, T, I = arrays.u.shape
        chunk, blocks = call.options.chunk, call.options.blocks
        tiles = choose_tiles(channels=I, chunk=chunk, blocks=blocks)
        return cls(
            B=B,
            T=T,
            I=I,
            N=arrays.a.shape[0],
            chunk=chunk,
            channels=tiles.channels,
            unroll=tiles.unroll,
            has_starts=arrays.keep is not None,
            interpret=call.options.interpret,
        )

    @property
    def blocks(self) -> int:
        return -(-self.T // ROWS)

    @property
    def columns(self) -> int:
        """Programs side by side over the channels."""
        return self.I // self.channels

    @property
    def chunks(self) -> int:
        """Chunks of a row, the last of which may be short."""
        return -(-self.T // self.chunk)

    @property
    def chunks_of_block(self) -> int:
        """Chunks that one program runs."""
        return min(self.chunks, ROWS // self.chunk)

    @property
    def positions(self) -> int:
        """Positions of a block that there are: fewer than 128 in short rows."""
        return min(self.T, ROWS)

    @property
    def state(self) -> tuple[int, int]:
        """Shape of a program's state: [N, channels]."""
        return self.N, self.channels

    @property
    def rows(self) -> tuple[int, int]:
        return ROWS, self.channels

    def rows_spec(self, *, reverse: bool = False) -> pl.BlockSpec:
        """Returns the BlockSpec of a program's positions and channels."""
        last = self.blocks - 1
        return pl.BlockSpec(
            (None, self.positions, self.channels),
            lambda n, j, k: (n, last - k if reverse else k, j),
        )

    def state_spec(self) -> pl.BlockSpec:
        """Returns the BlockSpec of a row's state."""
        return pl.BlockSpec((None, *self.state), lambda n, j, k: (n, 0, j))

    def kept_spec(self, *, reverse: bool = False) -> pl.BlockSpec:
        """Returns the BlockSpec of the states that enter a block's chunks."""
        last = self.blocks - 1
        return pl.BlockSpec(
            (None, self.chunks_of_block, *self.state),
            lambda n, j, k: (n, last - k if reverse else k, 0, j),
        )

    def specs(self, arrays: Arrays, *, reverse: bool = False) -> list[pl.BlockSpec]:
        """Returns the blocks of the op's arrays."""
        last = self.blocks - 1
        of_time = lambda n, j, k: (n, 0, last - k if reverse else k)  # noqa: E731
        of_channels = lambda n, j, k: (0, j)  # noqa: E731
        rows, shared = self.rows_spec(reverse=reverse), (None, self.N, ROWS)
        row = pl.BlockSpec((1, self.channels), of_channels)
        keep = pl.BlockSpec((None, 1, ROWS), of_time)
        a, by_state = (
            pl.BlockSpec(self.state, of_channels),
            pl.BlockSpec(shared, of_time),
        )
        always = [rows, rows, a, by_state, by_state, row, rows, row, self.state_spec()]
        return always if arrays.keep is None else [*always, keep]


def launch_kernel(
    launch: Launch, kernel, *arguments, in_specs, out_specs, out_shape, scratch
):
    """Runs a kernel body over rows, channels and, in order, a row's blocks."""
    return pl.pallas_call(
        partial(kernel, launch=launch),
        grid=(launch.B, launch.columns, launch.blocks),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        interpret=launch.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=LEAST_VMEM,
        ),
        name="selective_scan_" + kernel.__name__,
    )(*arguments)


def whole_lanes(x: Array) -> Array:
    """Pads the last axis with zeros to a multiple of 128."""
    missing = -x.shape[-1] % LANES
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


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
    # Past the row's end nothing was written: the values there are not gradients.
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
) -> tuple[SelectiveScanOutputs, Float[Array, "B G N I"] | None]:
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
    out = SelectiveScanOutputs(y[..., :I], final.swapaxes(1, 2)[:, :I])
    return out, states[0][..., :I] if states else None


def backward(
    call: SelectiveScanCall,
    residuals: Float[Array, "B G N I"],
    cotangents: SelectiveScanOutputs,
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
