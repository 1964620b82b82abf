"""From a process' own rows to arrays that lie over the mesh."""

from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from recurjax.sharding import batch_sharding
from recurjax.types import Batch


def place(rows: Mapping[str, np.ndarray], mesh: Mesh) -> Batch:
    """Puts one batch on the devices; each process gives the rows that are its own."""
    sharding = batch_sharding(mesh)

    def array(name: str) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, rows[name])

    segments = array("segments") if "segments" in rows else None
    return Batch(array("ids"), array("targets"), segments)


def placed(loader: Iterable[Mapping[str, np.ndarray]], mesh: Mesh) -> Iterator[Batch]:
    """Puts every batch of a loader on the devices."""
    return (place(rows, mesh) for rows in loader)
