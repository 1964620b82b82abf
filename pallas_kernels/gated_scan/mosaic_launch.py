"""Launch of the TPU kernels: blocks of rows, VMEM, and one heuristic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_scan.call import BlockSizes, flows_between
from pallas_kernels.target import LEAST_VMEM

LANES = 128
STRETCHES = 8
"""Stretches of a block that run side by side: the sublanes of a register."""
HALO = 16
"""Rows read before a block for the state before its first position: a tile in bf16."""
_BLOCK_BYTES = 32 * 2**20
_MOST_BYTES = LEAST_VMEM * 3 // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The tiles of a call.

    Attributes:
      stretch: positions of a stretch, even; a block has 8 stretches.
      linked: whether the state flows from one stretch into the next one; chunks are
        not linked.
    """

    stretch: int
    linked: bool

    @property
    def rows(self) -> int:
        """Returns the positions of a block."""
        return STRETCHES * self.stretch


class GateInputs(NamedTuple):
    """The gate's inputs to the kernels.

    Attributes:
      gate: [B, T, D]: the gate, or its logits.
      bias: float32 [1, D] where logits are given.
      resets: bfloat16 [B or 1, T, 128] where some state is reset: not 0 there.
    """

    gate: jax.Array
    bias: tuple[jax.Array, ...]
    resets: tuple[jax.Array, ...]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns them one after the other."""
        return (self.gate, *self.bias, *self.resets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that both kernels of a call share.

    Attributes:
      B, T, D: sizes.
      widths: widths of the streams, multiples of 128.
      logits: whether kernels make the gate of logits and a bias.
      resets: rows of the array that says where the state is reset: B, 1 where it is
        the same in all rows, 0 where there is none.
      head: E where queries read the last stream in the kernel; 0: none do. Stretches
        are then chunks.
      keeps: whether all states of a stream that is read are written, or its ends alone.
      interpret: False, True, or pltpu.InterpretParams for the TPU's own semantics.
    """

    B: int
    T: int
    D: int
    widths: tuple[int, ...]
    logits: bool
    resets: int
    tiles: Tiles
    head: int = 0
    keeps: bool = True
    interpret: bool | pltpu.InterpretParams = False

    @property
    def blocks(self) -> int:
        """Returns the blocks of a row."""
        return -(-self.T // self.tiles.rows)

    @property
    def read(self) -> int:
        """Returns how many streams queries read in the kernel: 1 or 0."""
        return int(self.head > 0)

    @property
    def together(self) -> int:
        """Returns how many groups of 128 lanes are computed at once."""
        groups = [width // LANES for width in (self.D, *self.widths)]
        return next(n for n in (4, 2, 1) if all(group % n == 0 for group in groups))

    def rows_spec(self, width: int, *, reverse: bool = False) -> pl.BlockSpec:
        """Returns a block of an array [B, T, width]."""
        block = self._block(reverse)
        return pl.BlockSpec(
            (None, self.tiles.rows, width), lambda i, j: (i, block(j), 0)
        )

    def ends_spec(self, *, reverse: bool = False) -> pl.BlockSpec:
        """Returns the ends of a block's 8 chunks of an array [B, 8 blocks, D]."""
        block = self._block(reverse)
        return pl.BlockSpec((None, STRETCHES, self.D), lambda i, j: (i, block(j), 0))

    def halo_spec(self) -> pl.BlockSpec:
        """Returns the rows before a block of an array [B, T, D], in reverse order."""
        block, tiles = self._block(True), self.tiles.rows // HALO
        return pl.BlockSpec(
            (None, HALO, self.D),
            lambda i, j: (i, jax.numpy.maximum(block(j) * tiles - 1, 0), 0),
        )

    def gate_specs(self, *, reverse: bool = False) -> list[pl.BlockSpec]:
        """Returns the blocks of `GateInputs`."""
        block, several = self._block(reverse), self.resets > 1
        resets = pl.BlockSpec(
            (None, self.tiles.rows, LANES),
            lambda i, j: (i if several else 0, block(j), 0),
        )
        bias = pl.BlockSpec((1, self.D), lambda i, j: (0, 0))
        return [
            self.rows_spec(self.D, reverse=reverse),
            *[bias] * self.logits,
            *[resets] * (self.resets > 0),
        ]

    @property
    def gate_counts(self) -> dict[str, int]:
        """Returns how many references of `GateInputs` come in tuples, by field."""
        return {"bias": int(self.logits), "resets": int(self.resets > 0)}

    def state_spec(self) -> pl.BlockSpec:
        """Returns a row's state of an array [B, 1, D]."""
        return pl.BlockSpec((None, 1, self.D), lambda i, j: (i, 0, 0))

    def _block(self, reverse: bool) -> Callable:
        return lambda j: self.blocks - 1 - j if reverse else j


def choose_tiles(
    *,
    T: int,
    D: int,
    streams: int,
    chunk: int | None,
    blocks: BlockSizes | None = None,
) -> Tiles:
    """Returns the cut for D channels of some streams.

    A block's float32 inputs and outputs, two buffers each, stay within half of VMEM.
    Chunks are stretches when a block of 8 of them fits and pays; else, as in a full
    sequence, stretches are linked and positions know where to reset.

    Args:
      blocks: a stretch in place of this.
    """
    stretch = None if blocks is None else blocks.stretch
    if stretch is not None:
        return Tiles(stretch=stretch, linked=flows_between(stretch, T, chunk))
    fitting = _BLOCK_BYTES // (row_bytes(D, streams) * STRETCHES) // 2 * 2
    most = max(2, min(32, fitting))
    if chunk is not None and chunk < T and 8 <= chunk <= most and chunk % 2 == 0:
        return Tiles(stretch=chunk, linked=False)
    return Tiles(stretch=min(most, max(2, -(-T // STRETCHES) // 2 * 2)), linked=True)


def row_bytes(D: int, streams: int) -> int:
    """Returns what a position takes of VMEM at most: backward, float32, two buffers."""
    return 2 * 4 * D * (2 + 5 * streams)


def refusal_of_tiles(tiles: Tiles, D: int, streams: int) -> str | None:
    """Returns why no TPU can run these sizes, None when one can."""
    if tiles.stretch % 2:
        return f"stretch must be even, got {tiles.stretch}"
    needed = tiles.rows * row_bytes(D, streams)
    if needed <= _MOST_BYTES:
        return None
    return (
        f"{STRETCHES} stretches of {tiles.stretch} positions need {needed:,} bytes of "
        f"VMEM, kernels may have {_MOST_BYTES:,}"
    )


def refusal_of_channels(D: int, streams: int) -> str | None:
    """Returns why the smallest block does not fit into VMEM, None when it does."""
    if HALO * row_bytes(D, streams) <= _MOST_BYTES:
        return None
    return f"{HALO} positions of {D} channels do not fit into VMEM, streams: {streams}"


def launch_kernel(
    launch: Launch,
    kernel: Callable,
    *arguments: jax.Array,
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    scratch_shapes: Sequence,
) -> Sequence[jax.Array]:
    """Runs a kernel body over rows and, in order, the blocks of a row."""
    return pl.pallas_call(
        partial(kernel, launch=launch),
        grid=(launch.B, launch.blocks),
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        scratch_shapes=list(scratch_shapes),
        interpret=launch.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=LEAST_VMEM,
        ),
        name=kernel.__name__.strip("_"),
    )(*arguments)
