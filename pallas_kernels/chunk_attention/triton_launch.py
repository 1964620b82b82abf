"""Launch of the Triton kernels: block sizes, and shared settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.chunk_attention.call import (
    Array,
    BlockSizes,
    ChunkAttentionCall,
)
from pallas_kernels.chunk_attention.visibility import cdiv
from pallas_kernels.powers import next_power, refusal_of_size
from pallas_kernels.target import on_hopper, shared_memory_bytes

HIDDEN = -1e30
"""The logit of an end that is not seen; a position's own term is always seen."""
LOG2_E = 1.4426950408889634
"""Kernels exponentiate by powers of two, which is what the hardware has."""
PROGRAMS = 256
"""About two programs for each multiprocessor of a data-centre GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Block sizes, powers of two from 16.

    Attributes:
      block_q: positions in a program of the forward kernel and of q's gradient.
      block_k: chunk ends that these read at once.
      backward_block_q: positions that a program of the ends' gradient reads at once.
      backward_block_k: its chunk ends.
      splits: programs that share the heads of a query group in the queries' gradient;
        divides their number. More than one costs a sum afterwards.
      warps: warps of a program; None: chosen by the size of its accumulators.
      stages: blocks that a loop has on their way at once.
    """

    block_q: int
    block_k: int
    backward_block_q: int
    backward_block_k: int
    splits: int
    warps: int | None
    stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that all kernels of a call share: sizes, and the masks it has."""

    batch: int
    length: int
    groups: int
    heads: int
    width: int
    ends: int
    chunk: int
    scale: float
    has_first: bool
    has_documents: bool
    tiles: Tiles
    interpret: bool

    @classmethod
    def of(cls, call: ChunkAttentionCall) -> "Launch":
        """Cuts the call by the caller's sizes or the heuristic."""
        (B, T, N, E), H = call.q.shape, call.own_logits.shape[2]
        return cls(
            batch=B,
            length=T,
            groups=N,
            heads=H,
            width=E,
            ends=call.ends.keys.shape[2],
            chunk=call.options.chunk,
            scale=call.options.scale,
            has_first=call.first is not None,
            has_documents=call.documents is not None,
            tiles=choose_tiles(
                batch=B,
                length=T,
                heads=H,
                groups=N,
                width=E,
                wide=call.q.dtype == jnp.float32,
                blocks=call.options.blocks,
            ),
            interpret=call.options.interpret,
        )

    @property
    def masks(self) -> dict[str, int]:
        """The number of references in a kernel's fields that `mask_arrays` fills."""
        documents = int(self.has_documents)
        return {
            "first": int(self.has_first),
            "documents": documents,
            "end_documents": documents,
        }


def choose_tiles(
    *,
    batch: int,
    length: int,
    heads: int,
    groups: int,
    width: int,
    wide: bool,
    blocks: BlockSizes | None = None,
) -> Tiles:
    """Returns sizes for B, T, H, N and E; `wide`: operands of four bytes.

    A program's accumulators stay within its registers: 128 x 128 float32 values for
    eight warps, a quarter of that with operands of four bytes. Not tuned on a device.

    Args:
      blocks: sizes in place of these.
    """
    overrides = {} if blocks is None else blocks.given()
    # What a program sums up, [rows, E] in float32, must stay in registers.
    most = 128 if width <= 128 else 32
    if wide:
        most = min(64, max(4096 // width, 16))
    rows = overrides.get("block_q", min(max(next_power(length), 16), most))
    programs = batch * groups * -(-length // rows)
    # Few programs leave multiprocessors idle: heads of a group are then shared out.
    splits, per_group = 1, heads // groups
    while programs * splits < PROGRAMS and splits < per_group:
        splits = next(n for n in range(splits + 1, per_group + 1) if per_group % n == 0)
    sizes = {
        "block_q": rows,
        "block_k": min(32 if wide else 64, most),
        "backward_block_q": min(rows, 32 if wide else 64),
        "backward_block_k": min(32 if wide else 64, most),
        "splits": splits,
        "warps": None,
        "stages": 2,
    }
    return Tiles(**(sizes | overrides))


def refusal_of_tiles(
    tiles: Tiles, *, per_group: int, width: int, itemsize: int
) -> str | None:
    """Returns why the target cannot run these sizes, None when it can.

    Args:
      per_group: heads of a query group.
      width: E.
      itemsize: bytes of an operand's number.
    """
    for name in ("block_q", "block_k", "backward_block_q", "backward_block_k"):
        reason = refusal_of_size(name, getattr(tiles, name), least=16)
        if reason is not None:
            return reason
    if tiles.warps is not None:
        reason = refusal_of_size("warps", tiles.warps, most=32)
        if reason is not None:
            return reason
    if per_group % tiles.splits:
        return (
            f"splits must divide the {per_group} heads of a query group, got "
            f"{tiles.splits}"
        )
    shared, hopper = shared_memory_bytes(), on_hopper()
    for looped, read in (
        ("block_q", "block_k"),
        ("backward_block_k", "backward_block_q"),
    ):
        # What the gradient's kernels take at least, as Triton 3.9 compiles them: two
        # arrays that stay, and two that are read ahead. In float32, which no matrix
        # unit multiplies, nothing is; Hopper's unit reads one block more from there.
        resident, passing = (
            2 * getattr(tiles, name) * width * itemsize for name in (looped, read)
        )
        ahead = tiles.stages - 1 + (hopper and getattr(tiles, looped) >= 64)
        needed = resident + passing * (1 if itemsize == 4 else max(ahead, 1))
        if needed > shared:
            return (
                f"{looped}={getattr(tiles, looped)}, {read}={getattr(tiles, read)} and "
                f"stages={tiles.stages} need {needed:,} bytes of shared memory, the "
                f"device has {shared:,}"
            )
    return None


def launch_kernel(
    launch: Launch,
    kernel: Callable,
    *arguments: Array,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    accumulator: int,
    products: int,
    pairs: int,
) -> Sequence[Array]:
    """Runs a kernel body over a grid.

    Args:
      accumulator: a program's float32 values that must stay in registers.
      products: matrix products that the kernel makes of each pair of a position and an
        end: 2 E FLOPs each.
      pairs: what `computed_pairs` counts. The kernels' loops end where causality does,
        so that no count of a loop's trips can know.
    """
    return pl.pallas_call(
        partial(kernel, launch=launch),
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        interpret=launch.interpret,
        compiler_params=pltriton.CompilerParams(
            num_warps=launch.tiles.warps or (8 if accumulator >= 64 * 128 else 4),
            num_stages=launch.tiles.stages,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * launch.width * pairs,
            transcendentals=pairs,
            bytes_accessed=sum(
                a.size * a.dtype.itemsize for a in (*arguments, *out_shape)
            ),
        ),
        name="chunk_attention" + kernel.__name__,
    )(*arguments)


def computed_pairs(launch: Launch, *, block_q: int, block_k: int) -> int:
    """Returns how many pairs of a position and an end the kernels compute, all heads.

    Counts full blocks, as the kernels run: an end that only the block's last position
    sees is computed for all of it. Where a row's number of its first chunk is an array,
    its positions may see every end and are counted so.
    """
    pairs = 0
    for start in range(0, launch.length, block_q):
        last = min(start + block_q, launch.length) - 1
        seen = launch.ends
        if not launch.has_first:
            seen = min(last // launch.chunk, launch.ends)
        pairs += block_q * cdiv(seen, block_k) * block_k
    return launch.batch * launch.heads * pairs


def mask_arrays(call: ChunkAttentionCall) -> list[Array]:
    """Returns what masks are made from: `first`, then documents of positions and ends.

    They are the first arguments of every kernel, and absent where there is none.
    """
    arrays = [call.first, call.documents, call.ends.documents]
    return [x.astype(jnp.int32) for x in arrays if x is not None]


def mask_specs(
    launch: Launch, rows: int, block: Callable[..., tuple[int, int]]
) -> list[pl.BlockSpec]:
    """Returns `mask_arrays`' blocks; `block` gives a program's (b, block of rows)."""
    specs = []
    if launch.has_first:
        specs.append(pl.BlockSpec((1,), lambda *at: (block(*at)[0],)))
    if launch.has_documents:
        specs.append(pl.BlockSpec((None, rows), block))
        ends = max(launch.ends, 1)
        specs.append(pl.BlockSpec((None, ends), lambda *at: (block(*at)[0], 0)))
    return specs


def first_chunk(at):
    """Returns the number of the chunk that holds t = 0 of the program's row."""
    return at.first[0][0] if at.first else 0


def same_document(launch: Launch, at, rows: Array, start, count: int) -> Array:
    """Returns [rows, count]: whether `count` ends from `start` share the documents."""
    (known,) = at.end_documents
    ends = start + jnp.arange(count)
    # No document has the number -1: an end that is not there is nobody's.
    ends = pltriton.load(
        known.at[pl.ds(start, count)], mask=ends < launch.ends, other=-1
    )
    return rows[:, None] == ends[None, :]


def load_rows(ref, *, real: Array) -> Array:
    """Returns a block [rows, E] or [rows], zeros where `real` [rows] is false."""
    mask = real if len(ref.shape) == 1 else _over(real, ref.shape)
    return pltriton.load(ref, mask=mask, other=0)


def store_rows(ref, values: Array, *, real: Array) -> None:
    """Writes a block's rows where `real` is true, in the block's dtype."""
    mask = real if len(ref.shape) == 1 else _over(real, ref.shape)
    pltriton.store(ref, values.astype(ref.dtype), mask=mask)


def dot(a: Array, b: Array, *, transposed: bool = False) -> Array:
    """Multiplies a b, or a b^T: float32 without tf32, accumulating in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _over(real: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(real[:, None], shape)
