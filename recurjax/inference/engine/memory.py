"""Memory of slots and texts, counted from shapes: nothing is allocated."""

import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from pallas_kernels import target
from recurjax.errors import UserError
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.inference.engine.config import EngineConfig
from recurjax.inference.engine.slots import DecodeStrategy, empty_slots
from recurjax.model import Decoder

MOST_SLOTS = 256
"""Of "auto": beyond it a step grows longer with each slot on most devices."""

_SHARE = 0.9
"""Of what is free: the rest is for activations."""

_MEMINFO = Path("/proc/meminfo")


def slots_that_fit(
    model: Decoder,
    config: EngineConfig,
    strategy: DecodeStrategy,
    *,
    free: int | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Returns how many slots an engine has: the same in every process.

    Args:
      strategy: how they move on.
      free: bytes there; None: asks the device, or the host where that is a CPU.
      mesh: the mesh whose devices may share the slots; "auto" counts on one device's
        memory.

    Raises:
      UserError: not one slot fits, or not as many as the config names.
    """
    row = row_bytes(model, config.length, strategy)
    free = _free_bytes() if free is None else free
    if mesh is not None and config.slots != "auto":
        free *= mesh.size
    # On top of the slots: kept states, the row into which a prompt is read, and weights
    # that the steps need in another layout.
    prompt = jax.eval_shape(
        lambda: model.init_cache(1, config.length, cache_dtype(model))
    )
    rest = _SHARE * free - config.states_gib * 2**30
    rest -= tree_bytes(prompt) + copied_bytes(model, strategy)
    # Round down: half a slot is useless.
    fits = int(rest // row)
    if fits < 1:
        raise UserError(
            f"a slot of {config.length} tokens takes {row / 2**20:,.1f} MiB, "
            f"and {free / 2**20:,.0f} MiB are free next to {config.states_gib} "
            "GiB of kept states: lower the slot length or states_gib, or "
            "request fewer new tokens"
        )
    if config.slots == "auto":
        return min(fits, MOST_SLOTS)
    if config.slots > fits:
        raise UserError(
            f"{config.slots} slots of {config.length} tokens take "
            f"{config.slots * row / 2**30:,.2f} GiB and only {fits} slots fit: "
            "use fewer slots or request fewer new tokens"
        )
    return config.slots


def row_bytes(model: Decoder, length: int, strategy: DecodeStrategy) -> int:
    """Counts what one more slot of `length` tokens holds: all of `Slots`."""
    # As shapes: nothing is allocated to count it.
    slots = partial(empty_slots, model, strategy=strategy, length=length)
    two, single = jax.eval_shape(lambda: (slots(rows=2), slots(rows=1)))
    return tree_bytes(two) - tree_bytes(single)


def copied_bytes(model: Decoder, strategy: DecodeStrategy) -> int:
    """Counts the weights that a strategy lays out next to the model's own."""
    return tree_bytes(jax.eval_shape(strategy.weights, model))


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
        # Not every device reports its memory; then use the host's.
        stats = jax.devices()[0].memory_stats() or {}
        if "bytes_limit" in stats:
            return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    with suppress(OSError):
        # The system drops cached files on demand: they do not count as used.
        match = re.search(r"MemAvailable:\s*(\d+) kB", _MEMINFO.read_text())
        if match is not None:
            return int(match[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


class StateSize(NamedTuple):
    """Bytes for one text of `tokens` tokens.

    Attributes:
      state: the model's own cache.
      attention: keys and values of every token in every layer, at the model's width:
        what a Transformer of this size holds whose keys are not shared by heads.
    """

    tokens: int
    state: int
    attention: int


def state_size(model: Decoder, tokens: int) -> StateSize:
    """Counts the bytes for a text, from shapes: nothing is allocated."""
    dtype = cache_dtype(model)
    cache = jax.eval_shape(lambda: model.init_cache(1, max(tokens, 1), dtype))
    stack = model.config.stack
    a_token = 2 * stack.layers * stack.width * jax.numpy.dtype(dtype).itemsize
    return StateSize(
        tokens=tokens,
        state=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
        attention=a_token * tokens,
    )


def state_sizes(model: Decoder, length: int) -> list[StateSize]:
    """Counts for texts of 1, 2, 4, ... tokens, the last one of `length`."""
    counts = [1 << power for power in range(length.bit_length())]
    return [state_size(model, tokens) for tokens in sorted({*counts, length})]


def in_words(size: StateSize) -> str:
    """Returns both as one line."""
    return (
        f"{size.tokens:,} tokens in {_bytes(size.state)} "
        f"(attention of this width: {_bytes(size.attention)})"
    )


def _bytes(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):,.1f} {unit}"
    return f"{count} bytes"
