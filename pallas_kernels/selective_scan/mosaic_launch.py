"""How the TPU kernels are launched: sizes, cut, arrays and their blocks."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.selective_scan.call import (
    BlockSizes,
    SelectiveScanCall,
    refusal_of_unroll,
)
from pallas_kernels.target import LEAST_VMEM

Array = jax.Array

LANES = 128
ROWS = LANES
"""Positions of a block: b and c have them along the lanes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How a call is cut.

    Attributes:
      channels: of a program, a multiple of 128.
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
    given = {} if blocks is None else blocks.given()
    groups = channels // LANES
    most = max(n for n in (1, 2, 3, 4) if groups % n == 0)
    chosen = {"channels": most * LANES, "unroll": min(chunk, 8)}
    return Tiles(**(chosen | given))


def refusal_of_tiles(
    tiles: Tiles, *, channels: int, states: int, chunk: int, itemsize: int
) -> str | None:
    """Returns why no TPU can run these sizes, None when one can.

    Args:
      channels: I, a multiple of 128.
      states: N.
      itemsize: bytes of a number of u.
    """
    own = tiles.channels
    if own % LANES or channels % own:
        return (
            f"channels must be a multiple of {LANES} that divides {channels}, got {own}"
        )
    # What the backward pass takes: two buffers of seven blocks of positions, and of a
    # block's kept states, sums by position, and a chunk's states three times.
    needed = 2 * ROWS * own * 7 * itemsize + 2 * (ROWS // chunk) * states * own * 4
    needed += 4 * own * (6 * ROWS + 3 * chunk * states)
    if needed > LEAST_VMEM:
        return (
            f"channels={own} need {needed:,} bytes of VMEM, kernels may have "
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
    """What every kernel of a call has in common: sizes, and how it is cut."""

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
        return -(-self.T // self.chunk)

    @property
    def chunks_of_block(self) -> int:
        return min(self.chunks, ROWS // self.chunk)

    @property
    def positions(self) -> int:
        """Positions of a block that there are: fewer than 128 in short rows."""
        return min(self.T, ROWS)

    @property
    def state(self) -> tuple[int, int]:
        return self.N, self.channels

    @property
    def rows(self) -> tuple[int, int]:
        return ROWS, self.channels

    def rows_spec(self, *, reverse: bool = False) -> pl.BlockSpec:
        """Of a program's positions and channels."""
        last = self.blocks - 1
        return pl.BlockSpec(
            (None, self.positions, self.channels),
            lambda n, j, k: (n, last - k if reverse else k, j),
        )

    def state_spec(self) -> pl.BlockSpec:
        """Of a row's state."""
        return pl.BlockSpec((None, *self.state), lambda n, j, k: (n, 0, j))

    def kept_spec(self, *, reverse: bool = False) -> pl.BlockSpec:
        """Of the states that enter a block's chunks."""
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
