"""Whether the mesh around a call cuts the tokens of a row, and what then must not be.

The mesh is the one that `jax.set_mesh` has set; axes that `shard_map` has cut already
do not count, so that code inside it sees whole arrays.
"""

import jax
from jax.sharding import AxisType
from jaxtyping import Shaped

from recurjax.types import Array

AXIS = "sequence"


def cut_axes() -> dict[str, int]:
    """Returns the sizes of the mesh's axes that cut something around this call."""
    mesh = jax.sharding.get_abstract_mesh()
    described = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {
        n: size for n, size, kind in described if kind == AxisType.Auto and size > 1
    }


def sequence_shards() -> int:
    """Returns S, the parts that the mesh cuts every row into."""
    return cut_axes().get(AXIS, 1)


def as_matrix(x: Shaped[Array, "... N"]) -> Shaped[Array, "... N"]:
    """Joins all axes but the last, unless the tokens of rows are cut.

    [B, T] joined has no cut that keeps each device's tokens on it: the compiler would
    gather them all on every device.
    """
    return x if sequence_shards() > 1 else x.reshape(-1, x.shape[-1])
