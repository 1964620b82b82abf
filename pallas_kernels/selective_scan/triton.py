"""GPU path: Pallas kernels lowered by Triton, a few channels of a row a program.

A program walks its row's positions in order. The state [N, channels] stays in registers
with a channel's N values in one thread, so that the sum over n needs no other thread.
From top to bottom: sizes and launch, what a program reads at a position, the kernels of
both passes, the backend.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from pallas_kernels.dispatch import refusal_of_one_position
from pallas_kernels.powers import refusal_of_size
from pallas_kernels.selective_scan.call import (
    BlockSizes,
    SelectiveScanCall,
    SelectiveScanOutputs,
    refusal_of_arrays,
    refusal_of_unroll,
)
from pallas_kernels.target import refusal_of_triton

Array = jax.Array

WARP = 32
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How a call is cut into programs; all are powers of two.

    Attributes:
      channels: of a program of the forward pass.
      backward_channels: of the backward pass: each of its programs writes sums over its
        channels for b and c, and fewer programs write fewer of them.
      unroll: positions whose inputs are read before the first of them is computed.
      backward_unroll: positions whose states are in registers at once on the way back.
      warps, backward_warps: of a program.
    """

    channels: int
    backward_channels: int
    unroll: int
    backward_unroll: int
    warps: int
    backward_warps: int


def choose_tiles(
    *, channels: int, chunk: int, blocks: BlockSizes | None = None
) -> Tiles:
    """Returns the cut for I channels. Not tuned on a device.

    Args:
      blocks: sizes in place of these.
    """
    given = {} if blocks is None else blocks.given()
    most = channels & -channels
    forward = given.get("channels", min(most, WARP))
    backward = given.get("backward_channels", min(most, 4 * WARP))
    chosen = {
        "channels": forward,
        "backward_channels": backward,
        "unroll": min(chunk & -chunk, 4),
        "backward_unroll": min(chunk & -chunk, 2),
        "warps": max(1, forward // WARP),
        # Twice the threads, half of the states in each: otherwise the backward pass
        # spills registers.
        "backward_warps": max(1, 2 * backward // WARP),
    }
    return Tiles(**(chosen | given))


def refusal_of_tiles(tiles: Tiles, *, channels: int, chunk: int) -> str | None:
    """Returns why these sizes cannot be for I channels, None when they can."""
    for name in ("channels", "backward_channels"):
        most = channels & -channels
        reason = refusal_of_size(name, getattr(tiles, name), most=most)
        if reason is not None:
            return reason
    for name in ("unroll", "backward_unroll"):
        reason = refusal_of_unroll(name, getattr(tiles, name), chunk)
        if reason is not None:
            return reason
    reason = refusal_of_size("warps", tiles.warps, most=32)
    return reason or refusal_of_size("backward_warps", tiles.backward_warps, most=32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What every kernel of a call has in common: sizes, and how it is cut."""

    B: int
    T: int
    I: int
    N: int
    chunk: int
    channels: int
    unroll: int
    warps: int
    interpret: bool

    @classmethod
    def of(cls, call: SelectiveScanCall, *, backward: bool) -> "Launch":
        (B, T, I), N = call.u.shape, call.a.shape[1]
        chunk, blocks = call.options.chunk, call.options.blocks
        tiles = choose_tiles(channels=I, chunk=chunk, blocks=blocks)
        return cls(
            B=B,
            T=T,
            I=I,
            N=N,
            chunk=chunk,
            channels=tiles.backward_channels if backward else tiles.channels,
            unroll=tiles.backward_unroll if backward else tiles.unroll,
            warps=tiles.backward_warps if backward else tiles.warps,
            interpret=call.options.interpret,
        )

    @property
    def chunks(self) -> int:
        """Chunks of a row, the last of which may be short."""
        return -(-self.T // self.chunk)

    @property
    def columns(self) -> int:
        """Programs side by side over a row's channels."""
        return self.I // self.channels


class Arrays(NamedTuple):
    """The op's arrays as the kernels address them, or references to them."""

    u: Any  # [B T, I]
    dt: Any  # [B T, I]
    a: Any  # [N, I], times log2(e): kernels raise 2 to it
    b: Any  # [B T, N]
    c: Any  # [B T, N]
    skip: Any  # [I]
    z: Any  # [B T, I]
    bias: Any  # [I]
    initial: Any  # [B N, I]
    starts: Any = None  # [B T], 1 where the state is set to zero; None: nowhere

    @classmethod
    def of(cls, call: SelectiveScanCall) -> "Arrays":
        (_, _, I), N = call.u.shape, call.a.shape[1]
        float32, starts = jnp.float32, call.starts
        assert call.skip is not None and call.z is not None
        assert call.dt_bias is not None
        return cls(
            u=call.u.reshape(-1, I),
            dt=call.dt.reshape(-1, I),
            a=call.a.astype(float32).T * LOG2_E,
            b=call.b.reshape(-1, N),
            c=call.c.reshape(-1, N),
            skip=call.skip.astype(float32),
            z=call.z.reshape(-1, I),
            bias=call.dt_bias.astype(float32),
            initial=call.initial.astype(float32).swapaxes(1, 2).reshape(-1, I),
            starts=None if starts is None else starts.astype(jnp.int32).reshape(-1),
        )


def launch_kernel(launch: Launch, kernel, arrays: Arrays, more: tuple, out_shape: list):
    """Runs a kernel body once for every row and block of channels."""
    given = [x for x in arrays if x is not None]

    def body(*refs):
        ins = Arrays(*refs[: len(given)])
        kernel(launch, ins, *refs[len(given) :])

    body.__name__ = "selective_scan_" + kernel.__name__
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        grid=(launch.B * launch.columns,),
        in_specs=[whole] * (len(given) + len(more)),
        out_specs=[whole] * len(out_shape),
        out_shape=out_shape,
        interpret=launch.interpret,
        compiler_params=pltriton.CompilerParams(num_warps=launch.warps, num_stages=1),
        name=body.__name__,
    )(*given, *more)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProgram:
    """The program's row and channels, and how it reads and writes there."""

    launch: Launch
    row: Array
    block: Array

    @classmethod
    def here(cls, launch: Launch) -> "BlockProgram":
        """Returns this program's indices: neighbours have neighbouring channels."""
        n = pl.program_id(0)
        return cls(
            launch=launch,
            row=n // launch.columns,
            block=n % launch.columns,
        )

    @property
    def channels(self):
        return pl.ds(self.block * self.launch.channels, self.launch.channels)

    def state(self, ref, number) -> Any:
        """Returns the place of the number-th [N, channels] of an array [_ N, I]."""
        N = self.launch.N
        return ref.at[pl.ds(number * N, N), self.channels]

    def read(self, ref, t, inside) -> Array:
        """Reads position t of an array [B T, I]; zeros where it is not `inside`."""
        at = ref.at[self.row * self.launch.T + t, self.channels]
        mask = jnp.full((self.launch.channels,), inside)
        return pltriton.load(at, mask=mask, other=0.0).astype(jnp.float32)

    def write(self, ref, t, value: Array, inside) -> None:
        """Writes position t of an array [B T, I] if it is `inside`."""
        at = ref.at[self.row * self.launch.T + t, self.channels]
        mask = jnp.full((self.launch.channels,), inside)
        pltriton.store(at, value.astype(ref.dtype), mask=mask)

    def read_shared(self, ref, t, inside) -> Array:
        """Reads position t of an array [B T, N] that all channels share."""
        at = ref.at[self.row * self.launch.T + t, pl.ds(0, self.launch.N)]
        mask = jnp.full((self.launch.N,), inside)
        return pltriton.load(at, mask=mask, other=0.0).astype(jnp.float32)

    def write_part(self, ref, t, value: Array, inside) -> None:
        """Writes position t of this block's part of an array [columns B T, N]."""
        line = (self.block * self.launch.B + self.row) * self.launch.T + t
        mask = jnp.full((self.launch.N,), inside)
        pltriton.store(ref.at[line, pl.ds(0, self.launch.N)], value, mask=mask)

    def step(self, ins: Arrays, t, bias: Array) -> "ScanStep":
        """Reads what moves the state at position t."""
        inside = t < self.launch.T
        raw = self.read(ins.dt, t, inside) + bias
        u = self.read(ins.u, t, inside)
        restart = None
        if ins.starts is not None:
            at = ins.starts.at[self.row * self.launch.T + t]
            restart = pltriton.load(at, mask=inside, other=0) > 0
        # Past the row's end the step is 0: the state stays as it is.
        delta = jnp.where(inside, softplus(raw), 0.0)
        return ScanStep(
            t, inside, raw, delta, u, self.read_shared(ins.b, t, inside), restart
        )


class ScanStep(NamedTuple):
    """What a position does to the state."""

    t: Array
    inside: Array
    raw: Array  # [channels], dt + bias
    delta: Array  # [channels], its softplus
    u: Array  # [channels]
    b: Array  # [N]
    restart: Array | None  # whether a document starts; None: nowhere

    def decay(self, a: Array) -> Array:
        """Returns what is left of the state before, [N, channels]."""
        decay = jnp.exp2(self.delta[None, :] * a)
        return decay if self.restart is None else jnp.where(self.restart, 0.0, decay)

    def advance(self, h: Array, decay: Array) -> Array:
        """Returns the state after the position."""
        return decay * h + self.b[:, None] * (self.delta * self.u)[None, :]


def softplus(x: Array) -> Array:
    """Returns log(1 + exp(x)), exact where it is small."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp2(-jnp.abs(x) * LOG2_E))


def sigmoid(x: Array) -> Array:
    """Returns 1 / (1 + exp(-x)), by a power of two."""
    return 1 / (1 + jnp.exp2(-x * LOG2_E))


# A program owns a row and a block of channels. Its state stays in registers from the
# first position to the last; the inputs of `unroll` positions are read before the
# state moves, so that the reads overlap. Crossing memory: u, dt, z and y once, b and c
# once a block of channels, and a state of every chunk where they are kept.
def forward_kernel(launch: Launch, ins: Arrays, y_ref, final_ref, *kept_ref):
    """Writes y, the last state and, where there is a place for them, kept states."""
    program = BlockProgram.here(launch)
    a = pltriton.load(program.state(ins.a, 0))
    bias = pltriton.load(ins.bias.at[program.channels])
    skip = pltriton.load(ins.skip.at[program.channels])

    def group(first, h):
        steps = [program.step(ins, first + i, bias) for i in range(launch.unroll)]
        outs = [
            (program.read_shared(ins.c, s.t, s.inside), program.read(ins.z, *s[:2]))
            for s in steps
        ]
        for s, (c, z) in zip(steps, outs, strict=True):
            h = s.advance(h, s.decay(a))
            y = jnp.sum(h * c[:, None], axis=0) + skip * s.u
            program.write(y_ref, s.t, y * z * sigmoid(z), s.inside)
        return h

    def one_chunk(g, h):
        for ref in kept_ref:
            pltriton.store(program.state(ref, program.row * launch.chunks + g), h)
        groups = launch.chunk // launch.unroll
        walk = lambda m, h: group(g * launch.chunk + m * launch.unroll, h)  # noqa: E731
        return jax.lax.fori_loop(0, groups, walk, h)

    h = pltriton.load(program.state(ins.initial, program.row))
    h = jax.lax.fori_loop(0, launch.chunks, one_chunk, h)
    pltriton.store(program.state(final_ref, program.row), h)


# The same programs, chunks from last to first. Registers cannot hold a chunk's states:
# from the kept one the program first walks to the start of each group of `unroll`
# positions and holds these; then, last group first, it makes the group's own states
# again and runs back over them. Gradients of b and c are sums over channels: each
# block writes its own part. Crossing memory: u, dt, z, dy and their gradients once
# (inputs are read again from the cache), kept states once, b and c once a block.
def backward_kernel(launch: Launch, ins: Arrays, kept_ref, dy_ref, d_final_ref, *outs):
    """Writes the gradients of everything; of b and c one block of channels' part."""
    du_ref, ddt_ref, dz_ref, db_ref, dc_ref, da_ref, d_initial_ref = outs[:7]
    d_skip_ref, d_bias_ref = outs[7:]
    program = BlockProgram.here(launch)
    a = pltriton.load(program.state(ins.a, 0))
    bias = pltriton.load(ins.bias.at[program.channels])
    skip = pltriton.load(ins.skip.at[program.channels])

    def back(s: ScanStep, before: Array, decay: Array, after: Array, sums):
        """Goes back over one position; `dh` is what the later ones ask of its state."""
        dh, da, d_skip, d_bias = sums
        c, z = program.read_shared(ins.c, s.t, s.inside), program.read(ins.z, *s[:2])
        d_out = program.read(dy_ref, s.t, s.inside)
        # 1. Through the gate y silu(z), whose y is made again from the state.
        gate = sigmoid(z)
        dy = d_out * z * gate
        y = jnp.sum(after * c[:, None], axis=0) + skip * s.u
        dz = d_out * y * gate * (1 + z * (1 - gate))
        program.write(dz_ref, s.t, dz, s.inside)
        program.write_part(dc_ref, s.t, jnp.sum(after * dy[None, :], axis=1), s.inside)
        # 2. The gradient of the state after this position: from y, and from later ones.
        g = dh + c[:, None] * dy[None, :]
        d_input = g * (s.delta * s.u)[None, :]
        program.write_part(db_ref, s.t, jnp.sum(d_input, axis=1), s.inside)
        # 3. What is left of it for the state before, and the exponent's share, for a
        # and s.
        dh = decay * g
        d_exponent = dh * before
        da = da + d_exponent * s.delta[None, :]
        of_input = jnp.sum(g * s.b[:, None], axis=0)
        program.write(du_ref, s.t, skip * dy + s.delta * of_input, s.inside)
        # 4. The step, then through its softplus to dt. `a` is held times log2(e).
        d_delta = s.u * of_input + jnp.sum(d_exponent * a, axis=0) / LOG2_E
        d_raw = d_delta * sigmoid(s.raw)
        program.write(ddt_ref, s.t, d_raw, s.inside)
        # Past the row's end dy and u are 0, but the exponent's part of d_raw is not.
        d_bias = d_bias + jnp.where(s.inside, d_raw, 0.0)
        return dh, da, d_skip + dy * s.u, d_bias

    groups, unroll = launch.chunk // launch.unroll, launch.unroll

    def walk(first, h):
        """Returns the states around each position of a group, and what moved them."""
        passed = []
        for i in range(unroll):
            s = program.step(ins, first + i, bias)
            decay = s.decay(a)
            after = s.advance(h, decay)
            passed.append((s, h, decay, after))
            h = after
        return passed

    # States that enter groups move up and down a tuple, for only loops that are loops
    # keep the program small: Triton's compiler looks at all of it for each load.
    def one_chunk(turn, sums):
        g = launch.chunks - 1 - turn
        h = pltriton.load(program.state(kept_ref, program.row * launch.chunks + g))

        def enter(m, entering):
            (*_, last) = walk(g * launch.chunk + m * unroll, entering[-1])
            return (*entering[1:], last[-1])

        def leave(turn, carry):
            entering, sums = carry
            first = g * launch.chunk + (groups - 1 - turn) * unroll
            for s, before, decay, after in reversed(walk(first, entering[-1])):
                sums = back(s, before, decay, after, sums)
            return (entering[0], *entering[:-1]), sums

        entering = jax.lax.fori_loop(0, groups - 1, enter, (h,) * groups)
        return jax.lax.fori_loop(0, groups, leave, (entering, sums))[1]

    dh = pltriton.load(program.state(d_final_ref, program.row))
    zeros = jnp.zeros((launch.channels,), jnp.float32)
    sums = (dh, jnp.zeros_like(dh), zeros, zeros)
    sums = jax.lax.fori_loop(0, launch.chunks, one_chunk, sums)
    dh, da, d_skip, d_bias = sums
    pltriton.store(program.state(d_initial_ref, program.row), dh)
    pltriton.store(program.state(da_ref, program.row), da)
    pltriton.store(d_skip_ref.at[program.row, program.channels], d_skip)
    pltriton.store(d_bias_ref.at[program.row, program.channels], d_bias)


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
) -> tuple[SelectiveScanOutputs, Float[Array, "B G N I"] | None]:
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
    out = SelectiveScanOutputs(y.reshape(call.u.shape), final)
    return out, states[0].reshape(B, G, N, I) if states else None


def backward(
    call: SelectiveScanCall,
    residuals: Float[Array, "B G N I"],
    cotangents: SelectiveScanOutputs,
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
