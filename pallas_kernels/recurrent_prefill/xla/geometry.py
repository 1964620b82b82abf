"""The geometry of the XLA path's loops: units, tiles, and the wavefront's skew.

A call's T positions are cut into tiles of b positions, and a tile into units: a unit is
what the recurrence handles at once, spec.block positions (1 for the Recurrent
Transformer). With L layers in one loop, layer l runs l tiles behind layer 0: its
position t is in slot t + l b. Slots, not positions, index the loop's buffers, so that
every layer reads and writes the same place at the same time.

Several devices may hold the layers, the stages of a `shard_map`: then each device
runs its own ones, which lag behind all layers of the stages before.

With a cache and spec.block > 1 a row also starts at its own phase within a block: it is
shifted right by that many slots, so that all rows' blocks begin together.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from pallas_kernels.recurrent_prefill.call import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Static sizes of one loop.

    Attributes:
      layers: L, all of which run in the loop; with stages those of one device.
      unit: positions handled at once.
      tile: b, a multiple of `unit`.
      tiles: tiles of one layer.
      chunk: keys of the prefix read at once.
      stages: devices that each run `layers` layers.
      axis: the mesh axis of those; None with one stage.
    """

    layers: int
    unit: int
    tile: int
    tiles: int
    chunk: int
    stages: int = 1
    axis: str | None = None

    @property
    def depth(self) -> int:
        """Layers of all stages."""
        return self.layers * self.stages

    @property
    def steps(self) -> int:
        """Tiles that the loop runs through."""
        return self.tiles + self.depth - 1

    def lags(self) -> Array:
        """Returns how many tiles each layer [L] runs after the very first one."""
        # A layer starts a tile when the layer below has finished it: one step later.
        lags = jnp.arange(self.layers)
        if self.axis is None:
            return lags
        return lags + self.layers * jax.lax.axis_index(self.axis)

    @property
    def positions(self) -> int:
        """Positions of one layer, padding included."""
        return self.tiles * self.tile

    @property
    def slots(self) -> int:
        """Slots of a buffer: those of all steps, rounded up as their readers need."""
        return -(-self.steps * self.tile // self.chunk) * self.chunk

    @property
    def units(self) -> int:
        """Units of a tile."""
        return self.tile // self.unit


def plan(
    *,
    layers: int,
    positions: int,
    unit: int,
    tile: int,
    chunk: int,
    phased: bool,
    stages: int = 1,
    axis: str | None = None,
) -> Geometry:
    """Lays out T positions; a tile or chunk longer than the sequence is cut down."""
    # A row that begins inside a block is shifted by up to unit - 1 slots.
    longest = positions + (unit - 1 if phased else 0)
    tile = min(tile, -(-longest // unit) * unit)
    tiles = -(-longest // tile)
    # A wavefront of L layers takes L - 1 steps more than one layer has tiles.
    length = (tiles + layers * stages - 1) * tile
    return Geometry(
        layers=layers,
        unit=unit,
        tile=tile,
        tiles=tiles,
        chunk=min(-(-chunk // tile) * tile, length),
        stages=stages,
        axis=axis,
    )


def to_slots(
    rows: Num[Array, "B T ..."], phase: Int[Array, " B"] | None, positions: int
) -> Num[Array, "slots B ..."]:
    """[B, T, ...] to [positions, B, ...]: shifted by each row's phase, zeros around."""
    T = rows.shape[1]
    behind = positions - T
    if phase is None:
        rows = _pad(rows, 0, behind, axis=1)
    else:
        # Cut out of zeros, so that row r's first position lands at its phase.
        padded = _pad(rows, positions, behind, axis=1)
        cut = lambda row, r: jax.lax.dynamic_slice_in_dim(  # noqa: E731
            row, positions - r, positions
        )
        rows = jax.vmap(cut)(padded, phase)
    return jnp.moveaxis(rows, 1, 0)


def from_slots(
    rows: Float[Array, "..."],
    phase: Int[Array, " B"] | None,
    positions: int,
    *,
    time: int,
) -> Float[Array, "..."]:
    """Slices the T positions out of axis `time`; the batch is the next axis."""
    if phase is None:
        return jax.lax.slice_in_dim(rows, 0, positions, axis=time)
    cut = lambda row, r: jax.lax.dynamic_slice_in_dim(  # noqa: E731
        row, r, positions, axis=time
    )
    return jax.vmap(cut, in_axes=(time + 1, 0), out_axes=time + 1)(rows, phase)


def skew(
    rows: Float[Array, "L ..."], geometry: Geometry, *, axis: int, fill: float = 0.0
) -> Float[Array, "L ..."]:
    """[L, ...] with positions on `axis` to slots: layer l moves back by l tiles."""
    b = geometry.tile
    if geometry.depth == 1:
        return rows
    late = (geometry.depth - 1) * b
    # Zeros on both sides, and each layer cuts its own stretch out.
    padded = _pad(rows, late, late, axis=axis, fill=fill)
    cut = lambda row, l: jax.lax.dynamic_slice_in_dim(  # noqa: E731
        row, late - l * b, geometry.steps * b, axis=axis - 1
    )
    return jax.vmap(cut)(padded, geometry.lags())


def unskew(
    rows: Float[Array, "L ..."], geometry: Geometry, *, axis: int
) -> Float[Array, "L ..."]:
    """Undoes `skew`, dropping what layers computed outside the sequence."""
    b, size = geometry.tile, geometry.positions
    if geometry.depth == 1:
        return jax.lax.slice_in_dim(rows, 0, size, axis=axis)
    cut = lambda row, l: jax.lax.dynamic_slice_in_dim(  # noqa: E731
        row, l * b, size, axis=axis - 1
    )
    return jax.vmap(cut)(rows, geometry.lags())


def join_tiles(
    rows: Float[Array, "steps L ..."], *, axis: int
) -> Float[Array, "L ..."]:
    """Turns [steps, L, ...] with the tile's slots on `axis` (of [L, ...]) to slots."""
    rows = jnp.moveaxis(rows, 0, axis)
    before, behind = rows.shape[:axis], rows.shape[axis + 2 :]
    return rows.reshape(*before, rows.shape[axis] * rows.shape[axis + 1], *behind)


def unskew_tiles(
    rows: Float[Array, "steps L ..."], geometry: Geometry, *, axis: int
) -> Float[Array, "L ..."]:
    """Turns a scan's [steps, L, ...] back to positions on `axis` of [L, ...]."""
    return unskew(join_tiles(rows, axis=axis), geometry, axis=axis)


def cut_tiles(
    rows: Float[Array, "L ..."], geometry: Geometry, *, axis: int
) -> Float[Array, "steps L ..."]:
    """Turns slots on `axis` of [L, ...] into [steps, L, ...] for a scan."""
    shape = rows.shape
    cut = (*shape[:axis], geometry.steps, geometry.tile, *shape[axis + 1 :])
    return jnp.moveaxis(rows.reshape(cut), axis, 0)


def split_units(
    rows: Float[Array, "..."], geometry: Geometry, *, axis: int
) -> Float[Array, "units ..."]:
    """Turns slots of a tile on `axis` into [units, ..., u, ...] for a scan."""
    shape = rows.shape
    cut = (*shape[:axis], geometry.units, geometry.unit, *shape[axis + 1 :])
    return jnp.moveaxis(rows.reshape(cut), axis, 0)


def _pad(
    rows: Array, before: int, behind: int, *, axis: int, fill: float = 0.0
) -> Array:
    widths = [(0, 0)] * rows.ndim
    widths[axis] = (before, behind)
    return jnp.pad(rows, widths, constant_values=fill)


def from_below(
    first: Float[Array, "1 ..."], z: Float[Array, "L ..."], geometry: Geometry
) -> Float[Array, "L ..."]:
    """Returns every layer's input [L, ...]: `first` [1, ...] for the first layer.

    Args:
      z: outputs [L, ...] of this stage's layers.
    """
    if geometry.axis is not None:
        up = [(s, s + 1) for s in range(geometry.stages - 1)]
        below = jax.lax.ppermute(z[-1:], geometry.axis, up)
        first = jnp.where(jax.lax.axis_index(geometry.axis) == 0, first, below)
    return jnp.concatenate([first, z[:-1]]) if z.shape[0] > 1 else first


def from_above(
    last: Float[Array, "1 ..."], dx: Float[Array, "L ..."], geometry: Geometry
) -> Float[Array, "L ..."]:
    """Returns the gradient of every layer's z [L, ...]: `last` for the last layer's.

    Args:
      dx: gradients of this stage's layers' inputs.
    """
    if geometry.axis is not None:
        down = [(s + 1, s) for s in range(geometry.stages - 1)]
        above = jax.lax.ppermute(dx[:1], geometry.axis, down)
        top = geometry.stages - 1
        last = jnp.where(jax.lax.axis_index(geometry.axis) == top, last, above)
    return jnp.concatenate([dx[1:], last]) if dx.shape[0] > 1 else last


def of_first_stage(
    rows: Float[Array, "T B D"], geometry: Geometry
) -> Float[Array, "T B D"]:
    """Returns the first stage's rows there and zeros elsewhere, parts of one sum."""
    return rows if geometry.axis is None else _where_stage(0, rows, geometry)


def of_last_stage(
    rows: Float[Array, "T B D"], geometry: Geometry
) -> Float[Array, "T B D"]:
    """Gives the last stage's rows to all."""
    if geometry.axis is None:
        return rows
    last = _where_stage(geometry.stages - 1, rows, geometry)
    return jax.lax.psum(last, geometry.axis)


def _where_stage(stage: int, rows: Array, geometry: Geometry) -> Array:
    here = jax.lax.axis_index(geometry.axis) == stage
    return jnp.where(here, rows, 0)
