"""In which order a training call runs its layers where the caller leaves it open.

Layer by layer a position of each layer launches its kernels; in a wavefront one launch
serves all layers. But layers start and end a tile apart: between its first and last
tile a layer computes as often as there are tiles, and what XLA computes of a tile it
computes of idle layers too. So the choice is between launches and bytes, which both
stand here as `recurjax plan` counts them for an H100.
"""

from typing import Any

import jax

from pallas_kernels.recurrent_prefill.arrays import (
    LayerWeights,
    RecurrentCache,
)
from pallas_kernels.target import shared_memory_bytes

LAUNCHES = 18
"""Of a position and layer in both passes, layer by layer."""
BYTES_A_LAUNCH = 6.7e6
"""What an H100's memory moves in the 2 us that a kernel takes to start."""
_TILE = 32
_MOST_HELD = 12e9
"""Bytes that a wavefront may hold beyond what layers hold one after the other: some
fifth of the memory of a GPU of a data centre."""
_LARGE_SHARED_MEMORY = 160_000
"""Bytes that those have, and others have not: 8.0 and 9.0, not 8.6, 8.9 and 12.0."""


def choose_schedule(
    schedule: str | None, x: Any, weights: LayerWeights, cache: RecurrentCache
) -> str:
    """Returns the caller's order of work, or the one that should take less time.

    A training step is bound by what takes longest, launches or bytes. A wavefront has
    the fewer launches and the more bytes: it is taken where, layer by layer, launches
    take longer than all that it moves.

    Args:
      x: [B, T, D], as weights and cache an array or what is known of its shape.
    """
    if schedule is not None:
        return schedule
    (B, T, D), L = x.shape, weights.w_q.shape[0]
    if L == 1 or cache.slots or shared_memory_bytes() < _LARGE_SHARED_MEMORY:
        return "prefix"
    matrices = [leaf for leaf in jax.tree.leaves(weights) if leaf.ndim > 2]
    W = sum(leaf.size for leaf in matrices) / L
    # Bytes a layer, fitted to the 300M model's step at 8 to 128 rows in bfloat16: its
    # weights at every position, rows; then, at each of L - 1 steps more, the weights'
    # gradients and a tile's rows.
    moved = T * (4.6 * W + 1225 * B * D) + (L - 1) * (40 * W + 328 * B * D * _TILE)
    held = 16.4 * B * T * L * D
    launched = T * LAUNCHES * BYTES_A_LAUNCH
    return "wavefront" if moved < launched and held < _MOST_HELD else "prefix"
