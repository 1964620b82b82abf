"""What forward and backward of the XLA path work out of a call's arguments."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    Rows,
)
from pallas_kernels.recurrent_prefill.block_sizes import BlockSizes, choose
from pallas_kernels.recurrent_prefill.mesh_layout import Stages
from pallas_kernels.recurrent_prefill.xla.biases import Visibility, visibility_of
from pallas_kernels.recurrent_prefill.xla.geometry import (
    Geometry,
    plan,
    to_slots,
)


class Call(NamedTuple):
    """What forward and backward work out of a call's arguments."""

    geometry: Geometry
    visibility: Visibility
    phase: Array | None
    wide: jnp.dtype
    together: bool

    @classmethod
    def of(
        cls,
        x: Array,
        weights: LayerWeights,
        cache: RecurrentCache,
        rows: Rows,
        *,
        spec: LayerSpec,
        schedule: str | None,
        tile: int | None,
        blocks: BlockSizes | None,
        stages: Stages,
    ) -> "Call":
        """Cuts the call; sizes that are None are measured ones or the heuristic's."""
        options = {"spec": spec, "schedule": schedule, "tile": tile, "blocks": blocks}
        tile, blocks = choose("xla", x, weights, cache, **options)
        T, L = x.shape[1], weights.w_q.shape[0]
        schedule = "prefix" if schedule is None else schedule
        together = schedule == "wavefront" or L == 1
        # With a real cache, rows may stand at different places within their blocks.
        phased = cache.slots > 0 and spec.block > 1 and T > 1
        tile, chunk = tile_and_chunk(
            positions=T,
            block=spec.block,
            schedule=schedule,
            tile=tile,
            keys=blocks.keys,
        )
        unit = spec.block if phased else min(spec.block, T)
        geometry = plan(
            layers=L if together else 1,
            positions=T,
            unit=unit,
            tile=tile,
            chunk=chunk,
            phased=phased,
            stages=stages.count,
            axis=stages.axis,
        )
        wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), spec.dtype)
        phase = cache.position % spec.block if phased else None
        segments = rows.segments
        if segments is not None:
            segments = to_slots(segments, phase, geometry.slots)
        visibility = visibility_of(cache, segments, phase, geometry, spec, wide)
        return cls(geometry, visibility, phase, wide, together)


def tile_and_chunk(
    *, positions: int, block: int, schedule: str, tile: int | None, keys: int | None
) -> tuple[int, int]:
    """Returns b, positions of a tile, and how many keys of its prefix are read at once.

    The caller's sizes, or the tile that measured fastest on two CPU cores. 8 rows,
    forward and backward: 32 and 64 do not differ at 256 positions of width 128; at 1024
    of width 256, 64 takes 12 % less CPU time than 32 and 28 % less than 128. `plan`
    rounds the keys up to whole tiles.
    """
    if schedule == "naive":
        return block, 256 if keys is None else keys
    if tile is None:
        tile = -(-(32 if positions <= 256 else 64) // block) * block
    return tile, 128 if keys is None else keys
