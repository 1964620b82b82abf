"""Launch of the TPU kernels: blocks, their indices, and shared settings.

Kernels see blocks [rows, E] of one head. Heads that fill complete registers (E a
multiple of 128) are read out of [B, T, H E] in place; others go before the positions
first, [B, H, T, E], which costs a copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.chunk_attention.call import (
    Array,
    BlockSizes,
    ChunkAttentionCall,
    at_least_one,
)
from pallas_kernels.chunk_attention.visibility import first_position, seen_ends
from pallas_kernels.target import LEAST_VMEM

HIDDEN = -1e30
"""The logit of an end that is not seen; a position's own term is always seen."""
LANES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Block sizes: multiples of 128, or the full axis.

    Attributes:
      block_q: positions.
      block_k: chunk ends.
    """

    block_q: int
    block_k: int


class Inputs(NamedTuple):
    """A call's arrays as the kernels read them: at least 8 positions and one end.

    A register has 8 rows; less cannot be multiplied. Nothing flows back through the
    positions that are added, because their gradient of o is zero.
    """

    first: Int[Array, " B"]  # int32
    documents: tuple[Array, ...]  # of positions [B, 1, T] and of ends [B, S, 1], or ()
    q: Float[Array, "B T N E"]
    own_logits: Float[Array, "B H 1 T"]  # float32
    own_values: Float[Array, "B T H E"]
    keys: Float[Array, "B H S E"]
    values: Float[Array, "B H S E"]

    @classmethod
    def of(cls, call: ChunkAttentionCall) -> "Inputs":
        """Lays the call's arrays out."""
        ends, first = at_least_one(call.ends), call.first
        q, own_logits, own_values = map(at_least_eight, call[:3])
        documents = ()
        if call.documents is not None and ends.documents is not None:
            of_positions = at_least_eight(call.documents).astype(jnp.int32)
            of_ends = ends.documents.astype(jnp.int32)
            documents = (of_positions[:, None], of_ends[..., None])
        if first is None:
            first = jnp.zeros(q.shape[0], jnp.int32)
        return cls(
            first=first.astype(jnp.int32),
            documents=documents,
            q=q,
            own_logits=own_logits.astype(jnp.float32).swapaxes(1, 2)[:, :, None],
            own_values=own_values,
            keys=ends.keys,
            values=ends.values,
        )


def at_least_eight(x: Array) -> Array:
    """Adds zeros up to 8 positions."""
    missing = max(0, 8 - x.shape[1])
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))


class At(NamedTuple):
    """The work of a program: batch row, head, block of positions, block of ends."""

    b: Array | int
    h: Array | int
    i: Array | int
    j: Array | int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that all kernels of a call share.

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

    @classmethod
    def of(cls, call: ChunkAttentionCall) -> "Launch":
        """Cuts the call by the caller's sizes or the heuristic."""
        (B, T, N, E), ends = call.q.shape, call.ends.keys.shape[2]
        length, blocks = max(T, 8), call.options.blocks
        return cls(
            batch=B,
            length=length,
            groups=N,
            heads=call.own_logits.shape[2],
            width=E,
            ends=ends,
            chunk=call.options.chunk,
            scale=call.options.scale,
            has_documents=call.documents is not None,
            tiles=choose_tiles(length=length, ends=max(ends, 1), blocks=blocks),
            interpret=call.options.interpret,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that `seen_ends` takes."""
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
    """Returns 512 x 512, or less for small calls: float32 logits take 1 MiB.

    Not tuned on a device.

    Args:
      blocks: sizes in place of these.
    """
    sizes = {} if blocks is None else blocks.given()
    return Tiles(
        block_q=min(sizes.get("block_q", 512), length),
        block_k=min(sizes.get("block_k", 512), ends),
    )


def refusal_of_tiles(launch: "Launch", itemsize: int) -> str | None:
    """Returns why no TPU can run a call's sizes, None when one can.

    Args:
      itemsize: bytes of an operand's number.
    """
    tiles, E = launch.tiles, launch.width
    axes = {"block_q": (launch.length, "positions"), "block_k": (launch.ends, "ends")}
    for name, (length, what) in axes.items():
        size = getattr(tiles, name)
        if size % LANES and size < length:
            return (
                f"{name} must be a multiple of {LANES}, or {what} of the call, got "
                f"{size} of {length}"
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


def position_spec(launch: Launch, at: Callable[..., At], heads: int) -> pl.BlockSpec:
    """Returns the [rows, E] of a program out of `by_position`'s array."""
    rows, E = launch.tiles.block_q, launch.width

    def place(*grid):
        b, h, i, _ = at(*grid)
        h = h % heads
        return (b, i, h) if E % LANES == 0 else (b, h, i, 0)

    shape = (None, rows, E) if E % LANES == 0 else (None, None, rows, E)
    return pl.BlockSpec(shape, place)


def scalar_spec(launch: Launch, at: Callable[..., At]) -> pl.BlockSpec:
    """Returns the [1, rows] of a program out of [B, H, 1, T]."""

    def place(*grid):
        b, h, i, _ = at(*grid)
        return b, h, 0, i

    return pl.BlockSpec((None, None, 1, launch.tiles.block_q), place)


def end_spec(launch: Launch, at: Callable[..., At]) -> pl.BlockSpec:
    """Returns the [ends, E] of a program out of [B, H, S, E]."""

    def place(*grid):
        b, h, _, j = at(*grid)
        return b, h, j, 0

    return pl.BlockSpec((None, None, launch.tiles.block_k, launch.width), place)


def document_specs(launch: Launch, at: Callable[..., At]) -> list[pl.BlockSpec]:
    """Returns the blocks of `Inputs.documents`."""
    if not launch.has_documents:
        return []

    def rows(*grid):
        b, _, i, _ = at(*grid)
        return b, 0, i

    def ends(*grid):
        b, _, _, j = at(*grid)
        return b, j, 0

    return [
        pl.BlockSpec((None, 1, launch.tiles.block_q), rows),
        pl.BlockSpec((None, launch.tiles.block_k, 1), ends),
    ]


def launch_kernel(
    launch: Launch,
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
        partial(kernel, launch=launch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=list(out_shape),
        interpret=launch.interpret,
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
