"""From a process' own rows to arrays that lie over the mesh."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from recurjax.sharding import batch_sharding, local_rows
from recurjax.types import Batch


def place(rows: Mapping[str, np.ndarray], mesh: Mesh, *, batch: int) -> Batch:
    """Puts one batch on the devices.

    Args:
      rows: [B, T] arrays of `local_rows`: a process' devices may need only some, where
        the mesh follows the links of a TPU pod.
      mesh: where to.
      batch: rows over all processes.
    """
    sharding = batch_sharding(mesh)
    first, _ = local_rows(batch, mesh)

    def array(name: str) -> jax.Array:
        own = rows[name]

        # jax asks for the part of each of this process' devices: rows are numbered over
        # all processes, and this one holds them from `first` on.
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch)
            return own[start - first : stop - first, index[1]]

        return jax.make_array_from_callback((batch, *own.shape[1:]), sharding, part)

    # Segments only where documents are told apart.
    segments = array("segments") if "segments" in rows else None
    return Batch(array("ids"), array("targets"), segments)


def placed(
    loader: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, *, batch: int
) -> Iterator[Batch]:
    """Puts every batch of a loader on the devices."""
    return (place(rows, mesh, batch=batch) for rows in loader)
