"""How the Triton kernels are launched: sizes, cut, arrays as they are addressed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.powers import refusal_of_size
from pallas_kernels.selective_scan.call import (
    BlockSizes,
    SelectiveScanCall,
    refusal_of_unroll,
)

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
        # Twice the threads, half of the states in each: the way back holds so many that
        # registers spill otherwise.
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
