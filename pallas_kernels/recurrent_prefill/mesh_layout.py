"""Shards the op over a mesh: rows are cut, and the layers of a wavefront.

Left to the compiler, the weights' gradients would be summed over the devices once a
tile, and no kernel would be cut at all. Here the devices meet once a call, and stages
of a wavefront once a tile (`xla/geometry.py`).
"""

from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec as P

from pallas_kernels import mesh_cut
from pallas_kernels.dispatch import Specs
from pallas_kernels.mesh_cut import Cut, free_axes
from pallas_kernels.recurrent_prefill.call import (
    LayerWeights,
    RecurrentCache,
    RecurrentPrefillCall,
    RecurrentPrefillOptions,
    Stages,
)

LAYER_AXIS = "stage"
"""The axis of the mesh that cuts the layers, where it has it: the cut's columns."""

_ROWS_AXIS = {"triton": 1, "mosaic_tpu": 1, "xla": 2}
"""Axis of the batch in each backend's residuals, after the layers' axis 0."""


def find_cut(call: RecurrentPrefillCall) -> Cut | None:
    """Returns how the current mesh cuts the call; None: it does not.

    A batch that the devices do not divide is computed in full on each of them. Stages
    always divide the layers, which `check_stages` ensures.
    """
    # Layers take the place of columns: the only axis besides the rows that cuts a call.
    return mesh_cut.find_cut(call.x.shape[0], lambda stages: True, axis=LAYER_AXIS)


def specs(cut: Cut, call: RecurrentPrefillCall, backend: str) -> Specs:
    """Returns how the call and a backend's results are sharded."""
    # Every stage holds all of x: the first one reads it. A stage's part of dx is zero
    # unless it is the first, and the frame adds the parts up.
    by_row, of_cache = P(cut.by_row), cache_specs(cut)
    # Positions come before the rows where a loop over tiles wrote them one by one.
    between = (None,) * (_ROWS_AXIS[backend] - 1)
    return Specs(
        call=call._replace(
            x=by_row, weights=P(cut.columns), cache=of_cache, rows=by_row
        ),
        outputs=(by_row, of_cache),
        residuals=P(cut.columns, *between, cut.by_row),
    )


def cache_specs(cut: Cut) -> RecurrentCache:
    """Returns how a cache's arrays are sharded."""
    of_layers: Any = P(cut.columns, cut.by_row)
    by_row: Any = P(cut.by_row)
    return RecurrentCache(*(of_layers,) * 5, position=by_row, written=by_row)


def options_on_device(
    cut: Cut, options: RecurrentPrefillOptions
) -> RecurrentPrefillOptions:
    """Returns the options of a device's part, with the stages that cut the layers."""
    if cut.columns is None:
        return options
    stages = Stages(cut.mesh.shape[cut.columns], cut.columns)
    return replace(options, stages=stages)


def stages_on_mesh() -> int:
    """Returns on how many devices the mesh that is set cuts the layers."""
    return free_axes().get(LAYER_AXIS, 1)


def check_stages(weights: LayerWeights, schedule: str | None) -> None:
    """Raises ValueError: several stages, and no wavefront or layers that don't fit."""
    stages, layers = stages_on_mesh(), weights.w_q.shape[0]
    if stages == 1:
        return
    if schedule != "wavefront":
        raise ValueError(
            'recurrent_prefill: needs schedule "wavefront" on a mesh of '
            f"{stages} stages, got {schedule!r}"
        )
    if layers % stages:
        raise ValueError(
            "recurrent_prefill: the number of stages must divide the layers, "
            f"got {layers} layers on {stages} stages"
        )
