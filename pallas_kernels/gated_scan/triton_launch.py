"""Launch of the Triton kernels: programs, and one heuristic."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.gated_scan.call import BlockSizes, flows_between
from pallas_kernels.powers import refusal_of_size

ENOUGH_PROGRAMS = 2048
"""Programs of one warp that fill a data-centre GPU: 16 on a multiprocessor."""
SHORTEST_BLOCK = 64
"""Positions; blocks of a full sequence are longer, so that summaries stay small."""
MOST_TILES = 16
"""Tiles of a narrow stream that one program owns, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The division of a call into programs.

    Attributes:
      positions: in one program's stretch of the sequence.
      linked: whether the state flows from one stretch into the next one; chunks are
        not linked.
      channels: channels of one tile in one program, a power of two.
      unroll: positions whose inputs are read before the first of them is computed.
      warps: warps of a program.
    """

    positions: int
    linked: bool
    channels: int
    unroll: int
    warps: int


class GateInputs(NamedTuple):
    """The gate's inputs to the kernels; references inside a kernel.

    Attributes:
      gate: [B T, tiles, W]: the gate, or its logits.
      bias: float32 [1, tiles, W] where logits are given.
      resets: int32 [B T] or [T] where some state is reset: not 0 there.
    """

    gate: Any
    bias: tuple[Any, ...]
    resets: tuple[Any, ...]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Returns them one after the other."""
        return (self.gate, *self.bias, *self.resets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that all kernels of a call share.

    Attributes:
      B, T, D: sizes.
      width: width of the narrowest stream; a program owns the same channels of all D /
        width tiles, so that a narrow stream is read once and its gradient summed on
        chip.
      streams: how many.
      lengths: whether rows have their own.
      logits: whether kernels make the gate of logits and a bias.
      resets: rows of the array that says where the state is reset: B, 1 where it is
        the same in all rows, 0 where there is none.
      head: E where queries read the last stream in the kernel; 0: none do. Stretches
        are then chunks.
      keeps: whether all states of a stream that is read are written, or its ends alone.
      interpret: runs the kernels as plain JAX, on any device.
    """

    B: int
    T: int
    D: int
    width: int
    streams: int
    lengths: bool
    logits: bool
    resets: int
    tiles: Tiles
    head: int = 0
    keeps: bool = True
    interpret: bool = False

    @property
    def blocks(self) -> int:
        """Returns the stretches of a row."""
        return -(-self.T // self.tiles.positions)

    @property
    def summaries(self) -> int:
        """Returns how many arrays tell what stretches make of a state; 0: no need."""
        chained = self.tiles.linked and self.blocks > 1
        return 1 + self.streams if chained else 0

    @property
    def together(self) -> int:
        """Returns how many tiles are one array in a kernel: a power of two."""
        tiles = self.D // self.width
        return tiles & -tiles

    @property
    def zeros(self) -> list[jax.Array]:
        """Returns zeros for every group of tiles of a program: [together, channels]."""
        shape = (self.together, self.tiles.channels)
        return [jnp.zeros(shape)] * (self.D // self.width // self.together)

    def line(self, lines: int) -> tuple[int, int, int]:
        """Returns the shape of `lines` lines of the gate's channels."""
        return lines, self.D // self.width, self.width

    @property
    def columns(self) -> int:
        """Returns the programs side by side over a tile's channels."""
        return self.width // self.tiles.channels

    @property
    def gate_counts(self) -> dict[str, int]:
        """Returns how many references of `GateInputs` come in tuples, by field."""
        return {"bias": int(self.logits), "resets": int(self.resets > 0)}

    @property
    def read(self) -> int:
        """Returns how many streams queries read in the kernel: 1 or 0."""
        return int(self.head > 0)

    @property
    def ragged(self) -> bool:
        """Returns whether a program reaches positions that are not its own."""
        S = self.tiles.positions
        return self.T % S != 0 or S % self.tiles.unroll != 0

    @property
    def programs(self) -> int:
        """Returns how many programs run."""
        return self.B * self.blocks * self.columns


def choose_tiles(
    *,
    B: int,
    T: int,
    D: int,
    width: int,
    chunk: int | None,
    head: int = 0,
    blocks: BlockSizes | None = None,
) -> Tiles:
    """Returns the cut for B rows of T positions and D channels, by heads if any.

    Each chunk is a program. A full sequence is not cut if batch and channels fill the
    device: then every input is read once.

    Args:
      blocks: sizes in place of these.
    """
    given = {} if blocks is None else blocks.given()
    if "stretch" in given:
        stretch = given["stretch"]
        flows = flows_between(stretch, T, chunk)
        cut = _channels(D, width, 0 if flows else head, given)
        return Tiles(positions=min(stretch, T), linked=flows, **cut)
    # Chunks as they are, where they are short or already many; few long ones are cut
    # like a full sequence, and the state is reset between them.
    if chunk is not None and chunk < T:
        cut = _channels(D, width, head, given)
        programs = B * (width // cut["channels"]) * -(-T // chunk)
        if chunk <= SHORTEST_BLOCK or programs >= ENOUGH_PROGRAMS // 4:
            return Tiles(positions=chunk, linked=False, **cut)
    cut = _channels(D, width, 0, given)
    columns, unroll = B * max(1, width // cut["channels"]), cut["unroll"]
    stretches = max(1, min(ENOUGH_PROGRAMS // columns, T // SHORTEST_BLOCK))
    # Full turns, so that only the last stretch checks whether each position exists.
    positions = -(-T // stretches)
    positions = -(-positions // unroll) * unroll
    return Tiles(positions=positions, linked=True, **cut)


def refusal_of_tiles(tiles: Tiles, *, width: int, head: int) -> str | None:
    """Returns why these sizes cannot be, None when they can.

    Args:
      width: width of the narrowest stream.
      head: E where queries read; 0 without.
    """
    whole = math.gcd(0 if tiles.linked else head, width)
    most = whole & -whole
    reason = refusal_of_size("channels", tiles.channels, most=most)
    reason = reason or refusal_of_size("warps", tiles.warps, most=32)
    if reason is None and tiles.unroll > tiles.positions:
        return (
            f"unroll must be at most the {tiles.positions} positions of a stretch, got "
            f"{tiles.unroll}"
        )
    return reason


def _channels(
    D: int, width: int, head: int, given: Mapping[str, int]
) -> dict[str, int]:
    """Returns how many channels of a tile a program has, and positions read at once.

    With the program's warps; what is given of these stays.
    """
    # The largest power of two that divides the width, and of one head only if queries
    # read them. With more than 8 tiles of 64 the backward pass spills registers.
    whole = math.gcd(head, width)  # The width without heads.
    channels = min(whole & -whole, 64 if 8 * width >= D else 32)
    channels = given.get("channels", channels)
    # As many loads in flight as the registers of the backward pass can hold.
    unroll = max(1, min(8, 512 // (channels * (D // width))))
    return {
        "channels": channels,
        "unroll": given.get("unroll", unroll),
        "warps": given.get("warps", 1),
    }


def launch_kernel(
    launch: Launch,
    kernel: Callable,
    *arguments: jax.Array,
    out_shape: Sequence[jax.ShapeDtypeStruct],
) -> Sequence[jax.Array]:
    """Runs a kernel body once for every program; it addresses full arrays itself."""
    # No blocks: a program reads a few channels of a position, and when, itself.
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(kernel, launch=launch),
        grid=(launch.programs,),
        in_specs=[whole] * len(arguments),
        out_specs=[whole] * len(out_shape),
        out_shape=list(out_shape),
        interpret=launch.interpret,
        compiler_params=pltriton.CompilerParams(
            num_warps=launch.tiles.warps, num_stages=1
        ),
        name=kernel.__name__.strip("_"),
    )(*arguments)
