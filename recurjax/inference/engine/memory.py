"""How many slots fit: bytes of a row, counted from shapes, and what is there."""

import os
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from pallas_kernels import target
from recurjax.errors import UserError
from recurjax.inference.decoding import cache_dtype
from recurjax.inference.engine.config import EngineConfig
from recurjax.inference.engine.slots import Way, empty_slots
from recurjax.model import Decoder

MOST_SLOTS = 256
"""Of "auto": beyond it a step grows longer with each slot on most devices."""

_SHARE = 0.9
"""Of what is free: the rest is for activations."""


def slots_that_fit(
    model: Decoder,
    config: EngineConfig,
    way: Way,
    *,
    free: int | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Returns how many slots an engine has: the same in every process.

    Args:
      way: how they move on.
      free: bytes there; None: asks the device, or the host where that is a CPU.
      mesh: whose devices may share the slots; "auto" counts on one device's memory.

    Raises:
      UserError: not one slot fits, or not as many as the config names.
    """
    row = row_bytes(model, config.length, way)
    free = _free_bytes() if free is None else free
    if mesh is not None and config.slots != "auto":
        free *= mesh.size
    # Beside the slots: kept states, the row into which a prompt is read, and what the
    # steps want of the weights in another form.
    prompt = jax.eval_shape(
        lambda: model.init_cache(1, config.length, cache_dtype(model))
    )
    rest = _SHARE * free - config.states_gib * 2**30
    rest -= tree_bytes(prompt) + copied_bytes(model, way)
    # Rounded down: half a slot holds nothing.
    fits = int(rest // row)
    if fits < 1:
        raise UserError(
            f"a slot of {config.length} tokens takes {row / 2**20:,.1f} MiB, and "
            f"{free / 2**20:,.0f} MiB are free beside {config.states_gib} GiB of kept "
            "states: give it a smaller length or fewer states"
        )
    if config.slots == "auto":
        return min(fits, MOST_SLOTS)
    if config.slots > fits:
        raise UserError(
            f"{config.slots} slots of {config.length} tokens take "
            f"{config.slots * row / 2**30:,.2f} GiB, more than is free: {fits} fit"
        )
    return config.slots


def row_bytes(model: Decoder, length: int, way: Way) -> int:
    """Counts what one more slot of `length` tokens holds: all of `Slots`."""
    # As shapes: nothing is allocated to count it.
    slots = partial(empty_slots, model, way=way, length=length)
    two, one = jax.eval_shape(lambda: (slots(rows=2), slots(rows=1)))
    return tree_bytes(two) - tree_bytes(one)


def copied_bytes(model: Decoder, way: Way) -> int:
    """Counts the weights that a way lays out for its steps, beside the model's own."""
    return tree_bytes(jax.eval_shape(way.weights, model))


def tree_bytes(tree: Any) -> int:
    """Sums the bytes of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _free_bytes() -> int:
    free = _free_bytes_here()
    if jax.process_count() == 1:
        return free
    # The least of all, in MiB: jax has no 64-bit integers by default.
    everywhere = multihost_utils.process_allgather(np.int32(free >> 20))
    return int(np.min(everywhere)) << 20


def _free_bytes_here() -> int:
    if not target.shares_host_memory():
        # Not every device says; then the host's memory stands for it.
        stats = jax.devices()[0].memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
