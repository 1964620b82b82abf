"""Block sizes of a call: the caller's, else measured ones, else the heuristic's."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import measured_sizes
from pallas_kernels.block_sizes import GivenSizes
from pallas_kernels.powers import next_power
from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """How a backend's kernels cut a call beside `tile`; None: the backend chooses.

    Attributes:
      rows: rows of the batch in one program.
      keys: slots of the prefix that are read at once, at most.
      depth: how much of the contracted axis a product reads at once, at most.
      columns: columns of one program of a product, at most.
      attend_rows: rows in one program of the attention step.
      sub_tile: positions of a tile that read its earlier pairs together, forward.
      splits: parts of the contracted axis that programs of their own multiply, at most,
        forward.
      stages: blocks of operands that are on their way at once, at most, forward.
    """

    rows: int | None = None
    keys: int | None = None
    depth: int | None = None
    columns: int | None = None
    attend_rows: int | None = None
    sub_tile: int | None = None
    splits: int | None = None
    stages: int | None = None


def choose(
    backend: str,
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None,
) -> tuple[int | None, BlockSizes]:
    """Returns the tile and the block sizes that the caller gave, or measured ones.

    What was measured belongs together: where the caller gives anything, the rest is the
    heuristic's.
    """
    if tile is None and blocks is None:
        shape = shape_class(x, weights, cache, spec=spec, schedule=schedule)
        found = dict(measured_sizes.find("recurrent_prefill", backend, shape))
        tile = found.pop("tile", None)
        blocks = BlockSizes.measured("recurrent_prefill", found)
    return tile, BlockSizes() if blocks is None else blocks


def shape_class(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    *,
    spec: LayerSpec,
    schedule: str | None,
) -> dict[str, Any]:
    """Returns what of a call its best block sizes depend on: one entry of the file.

    Batch and positions stand for all that round up to the same power of two.
    """
    B, T, D = x.shape
    return {
        "batch": next_power(B),
        "positions": next_power(T),
        "width": D,
        "inner_width": weights.w_up.shape[2],
        "gated": weights.w_gate is not None,
        "heads": spec.heads,
        "key_heads": spec.key_heads,
        "head_width": spec.head_width,
        "block": spec.block,
        "dtype": jnp.dtype(spec.dtype).name,
        "schedule": "prefix" if schedule is None else schedule,
        "training": cache.slots == 0,
    }
