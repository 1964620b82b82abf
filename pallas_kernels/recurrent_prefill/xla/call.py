"""What forward and backward of the XLA path work out of a call's arguments."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.xla.biases import Placement, place_rows
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry, plan, to_slots
from pallas_kernels.recurrent_prefill.xla.stages import Stages
from pallas_kernels.recurrent_prefill.xla.tile_sizes import choose_tiles


class Call(NamedTuple):
    """What forward and backward work out of a call's arguments."""

    geometry: Geometry
    place: Placement
    phase: Array | None
    wide: jnp.dtype
    together: bool

    @classmethod
    def of(
        cls, x, weights, cache, rows, spec, schedule, tile, stages: Stages
    ) -> "Call":
        T, L = x.shape[1], weights.w_q.shape[0]
        schedule = "prefix" if schedule is None else schedule
        together = schedule == "wavefront" or L == 1
        phased = cache.slots > 0 and spec.block > 1 and T > 1
        sizes = choose_tiles(
            positions=T, block=spec.block, schedule=schedule, tile=tile
        )
        unit = spec.block if phased else min(spec.block, T)
        geometry = plan(
            layers=L if together else 1,
            positions=T,
            unit=unit,
            tile=sizes.tile,
            chunk=sizes.chunk,
            phased=phased,
            doubling=schedule == "tiled",
            stages=stages.count,
            axis=stages.axis,
        )
        wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), spec.dtype)
        phase = cache.position % spec.block if phased else None
        segments = rows.segments
        if segments is not None:
            segments = to_slots(segments, phase, geometry.slots)
        place = place_rows(cache, segments, phase, geometry, spec, wide)
        return cls(geometry, place, phase, wide, together)
