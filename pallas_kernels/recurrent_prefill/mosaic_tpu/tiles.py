"""Block sizes of the TPU kernels and what they take of VMEM."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array, LayerWeights
from pallas_kernels.recurrent_prefill.spec import LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Block sizes.

    Attributes:
      tile: b, positions of one grid step.
      rows: rows of the batch that run together; the batch is padded to a multiple.
      keys: keys of the prefix read at once.
    """

    tile: int
    rows: int
    keys: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of one layer's call: widths in elements, `bytes` of a weight."""

    batch: int
    positions: int
    width: int
    heads_width: int
    inner_width: int
    gated: bool
    bytes: int

    @classmethod
    def of(cls, x: Array, weights: LayerWeights, spec: LayerSpec) -> "LayerSizes":
        """Reads the sizes off a call."""
        B, T, D = x.shape
        return cls(
            batch=B,
            positions=T,
            width=D,
            heads_width=spec.heads * spec.head_width,
            inner_width=weights.w_up.shape[2],
            gated=weights.w_gate is not None,
            bytes=jnp.dtype(spec.dtype).itemsize,
        )

    @property
    def pre_width(self) -> int:
        """Width of the MLP's first product."""
        return self.inner_width * (2 if self.gated else 1)


def choose_tiles(sizes: LayerSizes, tile: int | None, vmem: int) -> Tiles:
    """Returns the most rows that fit `vmem` bytes; `tile` overrides its positions."""
    tile = 16 if tile is None else tile
    keys = min(128, -(-sizes.positions // tile) * tile)
    most = -(-sizes.batch // 8) * 8
    for rows in (32, 16, 8):
        tiles = Tiles(tile=tile, rows=rows, keys=keys)
        if rows <= max(most, 8) and vmem_bytes(sizes, tiles) <= vmem:
            return tiles
    return Tiles(tile=tile, rows=8, keys=keys)


def vmem_bytes(sizes: LayerSizes, tiles: Tiles) -> int:
    """Estimates what the larger of the two kernels holds in VMEM."""
    D, HE, F, P = sizes.width, sizes.heads_width, sizes.inner_width, sizes.pre_width
    weights = sizes.bytes * (3 * HE * D + D * P + F * D)
    tile_rows = tiles.tile * tiles.rows
    prefix = 2 * tiles.rows * -(-sizes.positions // tiles.keys) * tiles.keys
    # Blocks come twice, for the one computed on and the one on its way; a float32 row
    # of the products by head is in flight besides.
    forward = (
        sizes.bytes * prefix * HE
        + tile_rows * 2 * (4 * 2 * D + sizes.bytes * 7 * HE)
        + tile_rows * 4 * 7 * HE
    )
    backward = (
        tile_rows * 2 * (4 * (7 * D + 5 * HE) + sizes.bytes * (5 * HE + 2 * P))
        + tile_rows * 4 * 6 * HE
    )
    return weights + max(forward, backward)


def refusal_of_sizes(sizes: LayerSizes, tile: int | None, vmem: int) -> str | None:
    """Returns why a layer of these sizes cannot run in `vmem` bytes, None if it can."""
    widths = {
        "D": sizes.width,
        "heads * head_width": sizes.heads_width,
        "F": sizes.inner_width,
    }
    for name, width in widths.items():
        if width % 128:
            return f"{name} must be a multiple of 128, got {width}"
    if tile not in (None, 16, 32):
        return f"runs tiles of 16 or 32 positions, got tile={tile}"
    needed = vmem_bytes(sizes, choose_tiles(sizes, tile, vmem))
    if needed > vmem:
        return (
            f"weights and prefix must fit {vmem >> 20} MiB of VMEM, got "
            f"{needed >> 20} MiB"
        )
    return None
