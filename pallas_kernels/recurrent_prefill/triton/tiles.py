"""Block sizes of the Triton kernels: one heuristic, and what no device can have."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.powers import next_power, refusal_of_size
from pallas_kernels.recurrent_prefill.arrays import LayerSpec
from pallas_kernels.recurrent_prefill.block_sizes import BlockSizes
from pallas_kernels.recurrent_prefill.tiles.layout import Tiles

_LEAST = 16
"""Rows, columns and depth of a product on a matrix unit, at least."""
_TILE_IN_REGISTERS = 32 * 4 * 64
"""Elements of a block [b, rows, E], three of which four warps hold without a spill."""
QUERIES = 32 * 64 * 4
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
    given = {} if blocks is None else blocks.given()
    itemsize = jnp.dtype(spec.dtype).itemsize
    if tile is None:
        # Pairs that a position reads over N positions: N / 2 b of the prefix and half
        # of what shares its sub-tile, or its tile backward. Layers of a wavefront stand
        # a tile apart, so that long ones leave more of them idle.
        tile = 64 if direction == "forward" and schedule != "wavefront" else 32
    sub_tile = given.get("sub_tile", min(tile, _LEAST))
    # A matrix unit takes at least 16 rows.
    rows = given.get("rows", min(max(next_power(batch), _LEAST), 128))
    # Beside 64 rows in float32 the forward products of 128 columns spill on 8.0.
    spills = direction == "forward" and rows == 64 and itemsize == 4
    columns = given.get("columns", 64 if spills else 128)
    # Products of float32 keep what they read in registers: beside 64 rows they spill at
    # a depth of 64, beside 128 at 32.
    depth = 64 if itemsize < 4 else max(_LEAST, min(32, 2048 // rows))
    stages = 3
    if direction == "forward" and itemsize < 4 and rows <= 64:
        # Few rows: programs wait for weights, of which more are on their way.
        depth, stages = 128, 6
    while depth > _LEAST and _needed(rows, columns, depth, itemsize) > shared:
        depth //= 2
    own = sub_tile if direction == "forward" else tile
    chosen = {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "attend_rows": _attend_rows(own, spec) if batch >= 64 else 1,
        "keys": _keys(tile, spec),
        "sub_tile": sub_tile,
        "splits": 8,
        "stages": stages,
    }
    return ProductTiles(tile=tile, **(chosen | given))


def _attend_rows(tile: int, spec: LayerSpec) -> int:
    """Returns the rows of a program whose registers hold what one of a tile reads.

    `own_tile_kernel` keeps three float32 blocks [b, rows, E]: at 4 rows of 32 queries
    of 64, 192 registers a thread of 255. `attend_kernel` keeps two, of a sub-tile.
    """
    each = tile * spec.head_width * _grouping(spec)
    return max(1, min(4, _TILE_IN_REGISTERS // each))


def _keys(tile: int, spec: LayerSpec) -> int:
    """Returns the slots of a chunk of the prefix, beside a tile's queries."""
    queries = bytes_of_queries(max(tile, 32), spec)
    # Beside 64 keys in float32 `prefix_kernel` spills 1,296 bytes on 8.0.
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
