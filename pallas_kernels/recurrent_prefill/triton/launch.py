"""Launch of the Triton kernels: block sizes, shared settings, blocks of arrays.

One heuristic chooses the sizes; `refusal_of_blocks` says which no device can have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int, Num

from pallas_kernels.moved_bytes import moving
from pallas_kernels.powers import next_power, refusal_of_size
from pallas_kernels.recurrent_prefill.call import Array, BlockSizes, LayerSpec
from pallas_kernels.recurrent_prefill.tiles.layout import Active, Tiles

_LEAST = 16
"""Rows, columns and depth of a product on a matrix unit, at least."""
_TILE_IN_REGISTERS = 32 * 4 * 64
"""Elements of a block [b, rows, E], three of which four warps hold without a spill."""
QUERIES = 32 * 64 * 4
"""Bytes of a tile's queries of one row and head with which four warps still hold chunks
of 64 keys. With twice of them in float32 they spill, and `query_kernel` takes 106,496
bytes of shared memory, where a block of 8.6 may have 101,376."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTiles(Tiles):
    """Block sizes with those of the products, all powers of two; a tile is at least 16.

    Attributes:
      depth: how much of the contracted axis a product reads at once, at most.
      columns: columns of one program of a product, at most.
      attend_rows: rows in one program of the attention step.
      sub_tile: positions whose queries read the tile's earlier pairs together, at most
        a tile; the forward pass's.
      splits: parts of the contracted axis that programs of their own multiply, at most;
        the forward pass's.
      stages: blocks of a product's operands that are on their way at once, at most; the
        forward pass's.
    """

    depth: int
    columns: int
    attend_rows: int
    sub_tile: int
    splits: int
    stages: int


Pass = Literal["forward", "backward"]


def choose_tiles(
    *,
    batch: int,
    tile: int | None,
    spec: LayerSpec,
    shared: int,
    direction: Pass,
    schedule: str | None = None,
    blocks: BlockSizes | None = None,
) -> ProductTiles:
    """Returns sizes for `batch` rows; `tile` and `blocks` override what they name.

    Args:
      spec: its dtype is that of the products' operands.
      shared: bytes of shared memory that a program may have.
      direction: the pass; what is kept for the backward one knows no tiles.
    """
    overrides = {} if blocks is None else blocks.given()
    itemsize = jnp.dtype(spec.dtype).itemsize
    if tile is None:
        # Pairs that a position reads over N positions: N / 2 b of the prefix and half
        # of what shares its sub-tile, or its tile backward. Layers of a wavefront stand
        # a tile apart, so that long ones leave more of them idle.
        tile = 64 if direction == "forward" and schedule != "wavefront" else 32
    sub_tile = overrides.get("sub_tile", min(tile, _LEAST))
    # A matrix unit takes at least 16 rows.
    rows = overrides.get("rows", min(max(next_power(batch), _LEAST), 128))
    # With 64 rows in float32 the forward products of 128 columns spill on 8.0.
    spills = direction == "forward" and rows == 64 and itemsize == 4
    columns = overrides.get("columns", 64 if spills else 128)
    # Products of float32 keep their operands in registers: with 64 rows they spill at a
    # depth of 64, with 128 at 32.
    depth = 64 if itemsize < 4 else max(_LEAST, min(32, 2048 // rows))
    stages = 3
    if direction == "forward" and itemsize < 4 and rows <= 64:
        # Few rows: programs wait for weights, of which more are on their way.
        depth, stages = 128, 6
    while depth > _LEAST and _needed(rows, columns, depth, itemsize) > shared:
        depth //= 2
    rows_of_tile = sub_tile if direction == "forward" else tile
    sizes = {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "attend_rows": _attend_rows(rows_of_tile, spec) if batch >= 64 else 1,
        "keys": _keys(tile, spec),
        "sub_tile": sub_tile,
        "splits": 8,
        "stages": stages,
    }
    return ProductTiles(tile=tile, **(sizes | overrides))


def _attend_rows(tile: int, spec: LayerSpec) -> int:
    """Returns the rows of a program whose registers hold what one of a tile reads.

    `own_tile_kernel` keeps three float32 blocks [b, rows, E]: at 4 rows of 32 queries
    of 64, 192 registers per thread of 255. `attend_kernel` keeps two, of a sub-tile.
    """
    each = tile * spec.head_width * _grouping(spec)
    return max(1, min(4, _TILE_IN_REGISTERS // each))


def _keys(tile: int, spec: LayerSpec) -> int:
    """Returns the slots of a chunk of the prefix that fit with a tile's queries."""
    queries = bytes_of_queries(max(tile, 32), spec)
    # With 64 keys in float32 `prefix_kernel` spills 1,296 bytes on 8.0.
    most = 64 if jnp.dtype(spec.dtype).itemsize < 4 else 32
    return max(16, min(most, 64 * QUERIES // queries))


def bytes_of_queries(tile: int, spec: LayerSpec) -> int:
    """Returns the bytes of a tile's queries that one program reads."""
    itemsize = jnp.dtype(spec.dtype).itemsize
    return tile * spec.head_width * itemsize * _grouping(spec)


def _grouping(spec: LayerSpec) -> int:
    """Returns 2 where a program runs through several query heads, else 1.

    Its loop over them takes registers too: in float32 some 32 bytes spilled.
    """
    return 1 if spec.heads == spec.key_heads else 2


def _needed(rows: int, columns: int, depth: int, itemsize: int) -> int:
    """Returns how much shared memory a product does at most.

    Three blocks of both operands, as Triton 3.9 compiles it for 9.0.
    """
    return 3 * (rows + columns) * depth * itemsize


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
    least_of = {"attend_rows": 1, "splits": 1}
    for name in ("rows", "keys", "depth", "columns", "attend_rows", "splits"):
        size, least = getattr(tiles, name), least_of.get(name, _LEAST)
        reason = refusal_of_size(name, size, least=least)
        if reason is not None:
            return reason
    if not _LEAST <= tiles.sub_tile <= tiles.tile or tiles.tile % tiles.sub_tile:
        return (
            f"sub_tile must be a power of two from {_LEAST} to tile={tiles.tile}, got "
            f"{tiles.sub_tile}"
        )
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


PROGRAMS = 128
"""About as many programs as a data-centre GPU has multiprocessors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings that all kernels of a call share.

    Attributes:
      shared: bytes of shared memory that a program may have.
      active: the layers that have a tile; None: all.
      interpret: runs the kernels as plain JAX, on any device.
    """

    spec: LayerSpec
    tiles: ProductTiles
    shared: int
    active: Active | None = None
    interpret: bool = False

    def columns(self, width: int, programs: int) -> int:
        """Returns the columns of one program, given how many row programs there are."""
        size = power_dividing(width, self.tiles.columns)
        # Few rows make few programs: narrower ones occupy the full GPU.
        while size > 32 and programs * (width // size) < PROGRAMS:
            size //= 2
        return size

    def depth(self, width: int) -> int:
        """Returns how much of a contracted axis is read at once."""
        return power_dividing(width, self.tiles.depth)

    def stages(self, columns: int) -> int:
        """Returns how many blocks of operands of a product are on their way at once."""
        itemsize = jnp.dtype(self.spec.dtype).itemsize
        block = (self.tiles.rows + columns) * self.tiles.depth * itemsize
        return max(2, min(self.tiles.stages, self.shared // block))

    def split(self, width: int, contracted: int, programs: int) -> tuple[int, int]:
        """Returns the columns of a program, and in how many parts it is contracted.

        The fewest bytes that a multiprocessor moves: a program's operands, and what the
        last program of a part of the result reads of the others' sums. Wide columns
        read rows less often, but leave most of the GPU idle unless programs share the
        contracted axis.

        Args:
          width, contracted: sizes of the weight's output and contracted axes.
          programs: how many there are for each part of the columns.
        """
        rows, depth = self.tiles.rows, self.depth(contracted)
        itemsize = jnp.dtype(self.spec.dtype).itemsize

        def moved(columns: int, splits: int) -> tuple[int, int]:
            count = programs * (width // columns) * splits
            operands = (rows + columns) * (contracted // splits) * itemsize
            sums = 4 * rows * columns * splits if splits > 1 else 0
            # Of equal ones the one with fewer programs.
            return -(-count // PROGRAMS) * (operands + sums), count

        most = power_dividing(width, self.tiles.columns)
        choices = [
            (columns, splits)
            for columns in (16, 32, 64, 128)
            for splits in (1, 2, 4, 8, 16)
            if min(most, 32) <= columns <= most and splits <= self.tiles.splits
            if contracted % (splits * depth) == 0
        ]
        return min(choices, key=lambda choice: moved(*choice))

    def unwritten(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns an array to be written before it is read; NaN in the interpreter."""
        if self.interpret:
            return jnp.full(shape, jnp.nan, dtype)
        return jax.lax.empty(shape, dtype)

    def query_warps(self) -> int:
        """Returns how many warps share a tile's queries of one row and head."""
        queries = bytes_of_queries(self.tiles.tile, self.spec)
        return 8 if queries > QUERIES else 4


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
    """Runs a kernel body with its static arguments over a grid, layers in front.

    Programs of a layer that is not active end at once.

    Args:
      refs: where there are many, the NamedTuple in which the kernel gets them all.
      aliases: arguments, by number, that an output is written into.
      reads: the share of arguments, by number, that all programs together read, on
        average over a tile or a call; the others they read in full, those that an
        output is written into not at all. `moving` declares the bytes from it.
      writes: the same of the outputs.
    """
    run, aliases = partial(kernel, **static), aliases or {}
    reads = dict.fromkeys(aliases, 0.0) | (reads or {})
    # An array that is given twice is read once.
    once = {id(array): (n, array) for n, array in reversed([*enumerate(arguments)])}
    moved = sum(_bytes_of(array) * reads.get(n, 1.0) for n, array in once.values())
    for n, array in enumerate(out_shape):
        moved += _bytes_of(array) * (writes or {}).get(n, 1.0)
    body = run if refs is None else lambda *each: run(refs(*each))
    inputs, in_specs, active = len(arguments), list(in_specs), launch.active
    if active is not None:
        skip = _overwrite_idle if launch.interpret else _skip_idle
        body = partial(skip, body, inputs)
        arguments = (*arguments, active.layers)
        in_specs.append(pl.BlockSpec((1,), lambda layer, *_: (layer,)))
        moved *= active.share
    call = pl.pallas_call(
        body,
        grid=grid,
        in_specs=in_specs,
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        input_output_aliases=aliases,
        interpret=launch.interpret,
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        name=kernel.__name__.strip("_"),
    )
    with moving(round(moved)):
        return call(*arguments)


def _skip_idle(body: Callable, inputs: int, *refs: Any) -> None:
    """Runs a kernel's body if the reference after its inputs is positive."""

    @pl.when(refs[inputs][0] > 0)
    def _():
        body(*refs[:inputs], *refs[inputs + 1 :])


def _overwrite_idle(body: Callable, inputs: int, *refs: Any) -> None:
    """Like `_skip_idle` in jax's interpreter, whose branches know no program.

    Values that a program would not have written become NaN: nothing can use them.
    """
    outputs = refs[inputs + 1 :]
    body(*refs[:inputs], *outputs)
    for ref in outputs:
        if jnp.issubdtype(ref.dtype, jnp.floating):
            ref[:] = jnp.where(refs[inputs][0] > 0, ref[:], jnp.nan)


def one_slot(array: Num[Array, "L slots B _"]) -> float:
    """Returns the share of a tile's array that one position has."""
    return 1.0 / array.shape[1]


def _bytes_of(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def like(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


class Position(NamedTuple):
    """A position of the call: inputs, and refs, of the forward step's kernels.

    In two parts, both int32 [1]: to add them up would be a launch at every position.

    Attributes:
      first: where its sub-tile begins.
      behind: its distance from there.
    """

    first: Any
    behind: Any

    def slot(self, ref: Any) -> jax.Array:
        """In a kernel: its index in [slots, ...], of a call, a tile or one slot."""
        return slot_of(self.first[0] + self.behind[0], ref.shape[0])


def slot_of(position: Int[Array, ""], slots: int) -> Int[Array, ""]:
    """Returns a position's slot in a ring of slots: tiles begin at full turns."""
    return jax.lax.rem(position, jnp.int32(slots))


POSITION = pl.BlockSpec((1,), lambda *_: (0,))
"""A position, or a part of one, int32 [1]: a kernel's first input."""


def dot(
    a: Float[Array, "N M"], b: Float[Array, "M columns"]
) -> Float[Array, "N columns"]:
    """Multiplies blocks, float32 operands without tf32; accumulates in float32."""
    return jnp.dot(
        a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def slope_of(spec: LayerSpec, head: jax.Array) -> jax.Array:
    """Returns ALiBi's slope of a query head, 0 without ALiBi."""
    m = spec.alibi_max_bias
    if m is None:
        return jnp.float32(0.0)
    return jnp.exp2(-m / spec.heads * (head + 1).astype(jnp.float32))


def warps_of(rows: int, columns: int) -> int:
    """Returns how many warps share a program's accumulator."""
    return 8 if rows * columns > 64 * 128 else 4


def row_spec(array: Num[Array, "L _ B width"], rows: int) -> pl.BlockSpec:
    """Returns all columns of a program's rows, [slots, rows, width]."""
    return pl.BlockSpec(
        (None, array.shape[1], rows, array.shape[3]), lambda l, i, j, *_: (l, 0, i, 0)
    )


def slot_spec(
    array: Num[Array, "L _ B width"], rows: int, columns: int
) -> pl.BlockSpec:
    """Returns a program's rows and columns in every slot."""
    return pl.BlockSpec(
        (None, array.shape[1], rows, columns), lambda l, i, j, *_: (l, 0, i, j)
    )


def column_spec(
    w: Float[Array, "L N M"], columns: int, offset: int = 0
) -> pl.BlockSpec:
    """Returns a program's columns of a weight."""
    return pl.BlockSpec(
        (None, w.shape[1], columns), lambda l, i, j, *_: (l, 0, offset + j)
    )


def vector_spec(columns: int, offset: int = 0) -> pl.BlockSpec:
    """Returns a program's columns of a vector [L, N]."""
    return pl.BlockSpec((None, columns), lambda l, i, j, *_: (l, offset + j))


def whole_spec(width: int) -> pl.BlockSpec:
    """Returns all of a vector [L, N]."""
    return pl.BlockSpec((None, width), lambda l, i, j, *_: (l, 0))


def head_spec(slots: int, width: int, group: int = 1) -> pl.BlockSpec:
    """Returns one row and head in every slot of [L, slots, B, heads width].

    Args:
      group: query heads of a program's grid that read the same head.
    """
    return pl.BlockSpec(
        (None, slots, None, width), lambda l, r, h: (l, 0, r, h // group)
    )


def cached_head_spec(
    cached: Num[Array, "L B S _"], width: int, group: int
) -> pl.BlockSpec:
    """Returns one row and head of a cache's keys or values, all slots."""
    return pl.BlockSpec(
        (None, None, cached.shape[2], width), lambda l, r, h: (l, r, 0, h // group)
    )


def head_scalars_spec(slots: int) -> pl.BlockSpec:
    """Returns one row and head in every slot of [L, slots, heads, B]."""
    return pl.BlockSpec((None, slots, None, None), lambda l, r, h: (l, 0, h, r))
