"""Whether the mesh around a call cuts the tokens of a row, and what then must not be.

Which mesh that is, and what of it counts, `free_axes` says.
"""

from jaxtyping import Shaped

from pallas_kernels.mesh_cut import free_axes
from recurjax.types import Array

SEQUENCE_AXIS = "sequence"


def sequence_shards() -> int:
    """Returns S, the parts that the mesh cuts every row into."""
    return free_axes().get(SEQUENCE_AXIS, 1)


def as_matrix(x: Shaped[Array, "... N"]) -> Shaped[Array, "... N"]:
    """Joins all axes but the last, unless the tokens of rows are cut.

    [B, T] joined has no cut that keeps each device's tokens on it: the compiler would
    gather them all on every device.
    """
    # Where rows are whole the join is free, and one product of two matrices is fastest.
    return x if sequence_shards() > 1 else x.reshape(-1, x.shape[-1])
