"""How the Triton kernels are launched: block sizes, one heuristic, blocks, one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Num

from pallas_kernels.moved_bytes import moving
from pallas_kernels.powers import next_power
from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.block_sizes import BlockSizes
from pallas_kernels.recurrent_prefill.tiles.layout import Tiles

PROGRAMS = 128
"""About as many programs as a data-centre GPU has multiprocessors."""
_LEAST = 16
"""Rows, columns and depth of a product on a matrix unit, at least."""
_TILE_IN_REGISTERS = 32 * 4 * 64
"""Elements of a block [b, rows, E], three of which four warps hold without a spill."""
_QUERIES = 32 * 64 * 4
"""Bytes of a tile's queries of one row and head beside which four warps hold chunks of
64 keys. With twice of them in float32 they spill, and `query_kernel` takes 106,496
bytes of shared memory, where a block of 8.6 may have 101,376."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTiles(Tiles):
    """Block sizes with those of the products, all powers of two; a tile is at least 16.

    Attributes:
      depth: how much of the contracted axis a product reads at once, at most.
      columns: columns of one program of a product, at most.
      attend_rows: rows in one program of the attention step.
    """

    depth: int
    columns: int
    attend_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What every kernel of a call has in common.

    Attributes:
      interpret: runs the kernels as plain JAX, on any device.
    """

    spec: LayerSpec
    tiles: ProductTiles
    interpret: bool = False

    def columns(self, width: int, programs: int) -> int:
        """Returns the columns of one program, given how many row programs there are."""
        size = power_dividing(width, self.tiles.columns)
        # Few rows make few programs: narrower ones occupy the whole GPU.
        while size > 32 and programs * (width // size) < PROGRAMS:
            size //= 2
        return size

    def depth(self, width: int) -> int:
        """Returns how much of a contracted axis is read at once."""
        return power_dividing(width, self.tiles.depth)

    def query_warps(self) -> int:
        """Returns how many warps share a tile's queries of one row and head."""
        queries = _bytes_of_queries(self.tiles.tile, self.spec)
        return 8 if queries > _QUERIES else 4


def choose_tiles(
    *,
    batch: int,
    tile: int | None,
    spec: LayerSpec,
    shared: int,
    blocks: BlockSizes | None = None,
) -> ProductTiles:
    """Returns sizes for `batch` rows; `tile` and `blocks` override what they name.

    Args:
      spec: its dtype is that of the products' operands.
      shared: bytes of shared memory that a program may have.
    """
    given = {} if blocks is None else blocks.given()
    itemsize = jnp.dtype(spec.dtype).itemsize
    tile = 32 if tile is None else tile
    # A matrix unit takes at least 16 rows.
    rows = given.get("rows", min(max(next_power(batch), _LEAST), 128))
    columns = given.get("columns", 128)
    # Products of float32 keep what they read in registers: beside 64 rows they spill at
    # a depth of 64, beside 128 at 32.
    depth = 64 if itemsize < 4 else max(_LEAST, min(32, 2048 // rows))
    while depth > _LEAST and _needed(rows, columns, depth, itemsize) > shared:
        depth //= 2
    chosen = {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "attend_rows": _attend_rows(tile, spec) if batch >= 64 else 1,
        "keys": _keys(tile, spec),
    }
    return ProductTiles(tile=tile, **(chosen | given))


def _attend_rows(tile: int, spec: LayerSpec) -> int:
    """Returns the rows of a program whose registers hold a tile's queries.

    `own_tile_kernel` keeps three float32 blocks [b, rows, E]: at 4 rows of 32 queries
    of 64, 192 registers a thread of 255.
    """
    each = tile * spec.head_width * _grouping(spec)
    return max(1, min(4, _TILE_IN_REGISTERS // each))


def _keys(tile: int, spec: LayerSpec) -> int:
    """Returns the slots of a chunk of the prefix, beside a tile's queries."""
    queries = _bytes_of_queries(max(tile, 32), spec)
    # Beside 64 keys in float32 `prefix_kernel` spills 1,296 bytes on 8.0.
    most = 64 if jnp.dtype(spec.dtype).itemsize < 4 else 32
    return max(16, min(most, 64 * _QUERIES // queries))


def _bytes_of_queries(tile: int, spec: LayerSpec) -> int:
    itemsize = jnp.dtype(spec.dtype).itemsize
    return tile * spec.head_width * itemsize * _grouping(spec)


def _grouping(spec: LayerSpec) -> int:
    """Returns 2 where a program runs through several query heads, else 1.

    Its loop over them takes registers too: in float32 some 32 bytes spilled.
    """
    return 1 if spec.heads == spec.key_heads else 2


def _needed(rows: int, columns: int, depth: int, itemsize: int) -> int:
    """Returns how much shared memory the product that takes most of it does at most.

    Read off `pair_product_back` as Triton 3.9 compiles it for 8.6 and 9.0.
    """
    # It reads two float32 rows ahead and turns them, and what goes into the matrix
    # unit, by way of shared memory; and two blocks of a weight, two of each.
    of_rows = (8 + 2 * itemsize) * depth + 4
    return rows * of_rows + 4 * columns * depth * itemsize


def refusal_of_tile(tile: int | None) -> str | None:
    """Returns why a caller's tile cannot be, None when it can."""
    if tile is None or tile in (16, 32, 64):
        return None
    return f"runs tiles of 16, 32 or 64 positions, got tile={tile}"


def refusal_of_blocks(tiles: ProductTiles, spec: LayerSpec, shared: int) -> str | None:
    """Returns why a device cannot run these sizes, None when it can.

    Args:
      shared: bytes of shared memory that a program may have.
    """
    for name in ("rows", "keys", "depth", "columns", "attend_rows"):
        size, least = getattr(tiles, name), 1 if name == "attend_rows" else _LEAST
        if size < least or size != next_power(size):
            return f"{name} must be a power of two from {least}, got {size}"
    if tiles.attend_rows > tiles.rows:
        return f"attend_rows must be at most rows={tiles.rows}, got {tiles.attend_rows}"
    itemsize = jnp.dtype(spec.dtype).itemsize
    needed = _needed(tiles.rows, tiles.columns, tiles.depth, itemsize)
    if needed > shared:
        return (
            f"rows={tiles.rows}, columns={tiles.columns} and depth={tiles.depth} need "
            f"{needed:,} bytes of shared memory, the device has {shared:,}"
        )
    return None


def refusal_of_width(name: str, width: int) -> str | None:
    """Returns why a product cannot be cut into blocks, None when it can."""
    if width % 16 == 0:
        return None
    return f"{name} must be a multiple of 16, got {width}"


def power_dividing(n: int, most: int) -> int:
    """Returns the largest power of two that divides n and is at most `most`."""
    return min(n & -n, most)


def launch_kernel(
    launch: Launch,
    kernel: Callable,
    *arguments: jax.Array,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    refs: Callable | None = None,
    aliases: dict[int, int] | None = None,
    reads: dict[int, float] | None = None,
    writes: dict[int, float] | None = None,
    warps: int = 4,
    stages: int = 3,
    **static,
) -> Sequence[jax.Array]:
    """Runs a kernel body with its static arguments over a grid.

    Args:
      refs: where there are many, the NamedTuple in which the kernel gets them all.
      aliases: arguments, by number, that an output is written into.
      reads: the share of arguments, by number, that all programs together read, on
        average over a tile or a call; the others they read whole, those that an output
        is written into not at all. What crosses memory is told by it, see `moving`.
      writes: the same of the outputs.
    """
    run, aliases = partial(kernel, **static), aliases or {}
    reads = dict.fromkeys(aliases, 0.0) | (reads or {})
    # An array that is given twice is read once.
    once = {id(array): (n, array) for n, array in reversed([*enumerate(arguments)])}
    moved = sum(_bytes_of(array) * reads.get(n, 1.0) for n, array in once.values())
    for n, array in enumerate(out_shape):
        moved += _bytes_of(array) * (writes or {}).get(n, 1.0)
    call = pl.pallas_call(
        run if refs is None else lambda *each: run(refs(*each)),
        grid=grid,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        input_output_aliases=aliases,
        interpret=launch.interpret,
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        name=kernel.__name__.strip("_"),
    )
    with moving(round(moved)):
        return call(*arguments)


def one_slot(array: Num[Array, "L slots B _"]) -> float:
    """Returns the share of a tile's array that one position has."""
    return 1.0 / array.shape[1]


def _bytes_of(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def like(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


POSITION = pl.BlockSpec((1,), lambda *_: (0,))
"""The position within the tile, an int32 [1]: first input of each step's kernels."""


def dot(
    a: Float[Array, "N M"], b: Float[Array, "M columns"]
) -> Float[Array, "N columns"]:
    """Multiplies blocks, float32 operands without tf32; accumulates in float32."""
    return jnp.dot(
        a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def slot(ref, t):
    """Returns where position t lies in [slots, rows, width]: one slot serves all."""
    return t if ref.shape[0] > 1 else 0


def warps_of(rows: int, columns: int) -> int:
    """Returns how many warps share a program's accumulator."""
    return 8 if rows * columns > 64 * 128 else 4


def row_spec(array: Num[Array, "L _ B width"], rows: int) -> pl.BlockSpec:
    """Returns all columns of a program's rows, [slots, rows, width]."""
    return pl.BlockSpec(
        (None, array.shape[1], rows, array.shape[3]), lambda l, i, j: (l, 0, i, 0)
    )


def slot_spec(
    array: Num[Array, "L _ B width"], rows: int, columns: int
) -> pl.BlockSpec:
    """Returns a program's rows and columns in every slot."""
    return pl.BlockSpec(
        (None, array.shape[1], rows, columns), lambda l, i, j: (l, 0, i, j)
    )


def column_spec(
    w: Float[Array, "L N M"], columns: int, offset: int = 0
) -> pl.BlockSpec:
    """Returns a program's columns of a weight."""
    return pl.BlockSpec((None, w.shape[1], columns), lambda l, i, j: (l, 0, offset + j))


def vector_spec(columns: int, offset: int = 0) -> pl.BlockSpec:
    """Returns a program's columns of a vector [L, N]."""
    return pl.BlockSpec((None, columns), lambda l, i, j: (l, offset + j))


def whole_spec(width: int) -> pl.BlockSpec:
    """Returns all of a vector [L, N]."""
    return pl.BlockSpec((None, width), lambda l, i, j: (l, 0))
