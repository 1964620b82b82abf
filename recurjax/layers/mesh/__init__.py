"""Where activations lie on a mesh, and the axes that a stack refuses."""

from recurjax.layers.mesh.mesh_axes import (
    STAGE_AXIS,
    UncutStack,
    refuse_sequence,
    refuse_stages,
)
from recurjax.layers.mesh.row_sharding import keep_rows_apart, keep_slots_apart
from recurjax.layers.mesh.sequence_axis import SEQUENCE_AXIS, as_matrix, sequence_shards

__all__ = [
    "SEQUENCE_AXIS",
    "STAGE_AXIS",
    "UncutStack",
    "as_matrix",
    "keep_rows_apart",
    "keep_slots_apart",
    "refuse_sequence",
    "refuse_stages",
    "sequence_shards",
]
