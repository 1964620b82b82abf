"""How the TPU kernels are launched: blocks, their places, and what kernels share.

Kernels see blocks [rows, E] of one head. Heads that fill whole registers (E a multiple
of 128) are read out of [B, T, H E] in place; others go before the positions first,
[B, H, T, E], which costs a copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chunk_attention.arrays import Array, ChunkEnds
from pallas_kernels.chunk_attention.block_sizes import BlockSizes
from pallas_kernels.chunk_attention.visibility import first_position, seen_ends
from pallas_kernels.target import LEAST_VMEM

HIDDEN = -1e30
"""The logit of an end that is not seen; a position's own term is always seen."""
LANES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Block sizes: multiples of 128, or the whole axis.

    Attributes:
      block_q: positions.
      block_k: chunk ends.
    """

    block_q: int
    block_k: int


class At(NamedTuple):
    """What a program works on: batch row, head, block of positions, block of ends."""

    b: Array | int
    h: Array | int
    i: Array | int
    j: Array | int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What every kernel of a call has in common.

    Attributes:
      interpret: False, True, or pltpu.InterpretParams for the TPU's own semantics.
    """

    batch: int
    length: int
    groups: int
    heads: int
    width: int
    ends: int
    chunk: int
    scale: float
    has_documents: bool
    tiles: Tiles
    interpret: bool | pltpu.InterpretParams

    @property
    def sizes(self) -> dict[str, int]:
        """What `seen_ends` takes."""
        return {"chunk": self.chunk, "ends": self.ends}

    def blocks_of_ends(self, i, first):
        """Returns how many blocks of ends the positions of block i see any of."""
        last = jnp.minimum((i + 1) * self.tiles.block_q, self.length) - 1
        return pl.cdiv(seen_ends(first, last, **self.sizes), self.tiles.block_k)

    def first_block(self, j, first):
        """Returns the first block of positions that sees any of block j of ends."""
        s = j * self.tiles.block_k
        return first_position(first, s, chunk=self.chunk) // self.tiles.block_q


def choose_tiles(*, length: int, ends: int, blocks: BlockSizes | None = None) -> Tiles:
    """Returns 512 x 512, less where there is less: float32 logits take 1 MiB.

    Not tuned on a device.

    Args:
      blocks: sizes in place of these.
    """
    given = {} if blocks is None else blocks.given()
    return Tiles(
        block_q=min(given.get("block_q", 512), length),
        block_k=min(given.get("block_k", 512), ends),
    )


def refusal_of_tiles(call: "Call", itemsize: int) -> str | None:
    """Returns why no TPU can run a call's sizes, None when one can.

    Args:
      itemsize: bytes of an operand's number.
    """
    tiles, E = call.tiles, call.width
    axes = {"block_q": (call.length, "positions"), "block_k": (call.ends, "ends")}
    for name, (whole, what) in axes.items():
        size = getattr(tiles, name)
        if size % LANES and size < whole:
            return (
                f"{name} must be a multiple of {LANES}, or {what} of the call, got "
                f"{size} of {whole}"
            )
    # What the queries' gradient takes: two buffers of each block, sums and four arrays
    # of logits in float32.
    needed = 2 * E * itemsize * (6 * tiles.block_q + 2 * tiles.block_k)
    needed += 4 * tiles.block_q * (E + 4 * tiles.block_k)
    if needed > LEAST_VMEM:
        return (
            f"block_q={tiles.block_q} and block_k={tiles.block_k} need {needed:,} "
            f"bytes of VMEM, kernels may have {LEAST_VMEM:,}"
        )
    return None


def by_position(x: Array) -> Array:
    """Turns [B, T, H, E] into what kernels read."""
    B, T, H, E = x.shape
    return x.reshape(B, T, H * E) if E % LANES == 0 else x.swapaxes(1, 2)


def from_position(x: Array, heads: int) -> Array:
    """Turns `by_position`'s array back."""
    if x.ndim == 3:
        return x.reshape(*x.shape[:2], heads, -1)
    return x.swapaxes(1, 2)


def shape_by_position(like: Array, dtype=None) -> jax.ShapeDtypeStruct:
    """Returns what `by_position` makes of `like`, as a shape."""
    shape = jax.eval_shape(by_position, like).shape
    return jax.ShapeDtypeStruct(shape, like.dtype if dtype is None else dtype)


def position_spec(call: Call, at: Callable[..., At], heads: int) -> pl.BlockSpec:
    """Returns the [rows, E] of a program out of `by_position`'s array."""
    rows, E = call.tiles.block_q, call.width

    def place(*grid):
        b, h, i, _ = at(*grid)
        h = h % heads
        return (b, i, h) if E % LANES == 0 else (b, h, i, 0)

    shape = (None, rows, E) if E % LANES == 0 else (None, None, rows, E)
    return pl.BlockSpec(shape, place)


def scalar_spec(call: Call, at: Callable[..., At]) -> pl.BlockSpec:
    """Returns the [1, rows] of a program out of [B, H, 1, T]."""

    def place(*grid):
        b, h, i, _ = at(*grid)
        return b, h, 0, i

    return pl.BlockSpec((None, None, 1, call.tiles.block_q), place)


def end_spec(call: Call, at: Callable[..., At]) -> pl.BlockSpec:
    """Returns the [ends, E] of a program out of [B, H, S, E]."""

    def place(*grid):
        b, h, _, j = at(*grid)
        return b, h, j, 0

    return pl.BlockSpec((None, None, call.tiles.block_k, call.width), place)


def document_specs(call: Call, at: Callable[..., At]) -> list[pl.BlockSpec]:
    """Returns the blocks of `document_arrays`."""
    if not call.has_documents:
        return []

    def rows(*grid):
        b, _, i, _ = at(*grid)
        return b, 0, i

    def ends(*grid):
        b, _, _, j = at(*grid)
        return b, j, 0

    return [
        pl.BlockSpec((None, 1, call.tiles.block_q), rows),
        pl.BlockSpec((None, call.tiles.block_k, 1), ends),
    ]


def document_arrays(ends: ChunkEnds, documents: Array | None) -> list[Array]:
    """Returns documents of positions [B, 1, T] and of ends [B, S, 1], or nothing."""
    if documents is None or ends.documents is None:
        return []
    return [
        documents.astype(jnp.int32)[:, None],
        ends.documents.astype(jnp.int32)[..., None],
    ]


def launch(
    call: Call,
    kernel: Callable,
    first: Array,
    *arguments: Array,
    grid: tuple[int, ...],
    parallel: int,
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[tuple[int, int]],
) -> Sequence[Array]:
    """Runs a kernel body over a grid, `first` [B] in scalar memory.

    Args:
      parallel: how many axes of the grid come before those that share `scratch`.
      scratch: shapes of float32 accumulators.
    """
    semantics = [pltpu.PARALLEL] * parallel + [pltpu.ARBITRARY] * (len(grid) - parallel)
    return pl.pallas_call(
        partial(kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=list(out_shape),
        interpret=call.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=LEAST_VMEM
        ),
        name="chunk_attention" + kernel.__name__,
    )(first, *arguments)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Multiplies over one axis of each: float32 exactly, accumulating in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
