"""Where activations lie on a mesh: each device keeps its own rows, whole in width."""

import math

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Shaped

from pallas_kernels.mesh_cut import COLUMN_AXIS, ROW_AXES, free_axes, row_axes
from recurjax.layers.mesh.sequence_axis import SEQUENCE_AXIS
from recurjax.types import Array


def keep_rows_apart(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
    """Pins activations to the sharding of the batch, the axes after B and T whole.

    `fsdp` cuts parameters by their width too. Left to itself, the compiler may carry
    that cut over to the activations and sum every product over devices, which sends far
    more than the parameters would be. The gradient of x is pinned as x is.

    Returns:
      x itself where the mesh cuts nothing, or does not divide B or T.
    """
    cut = free_axes()
    rows = tuple(axis for axis in ROW_AXES if axis in cut)
    tokens = SEQUENCE_AXIS if SEQUENCE_AXIS in cut else None
    shards = math.prod(cut[axis] for axis in rows)
    if not rows and tokens is None:
        return x
    # A batch that the devices do not divide lies whole on each of them; pinning it
    # would fail.
    if x.shape[0] % shards or x.shape[1] % cut.get(SEQUENCE_AXIS, 1):
        return x
    # None keeps an axis whole: widths are never cut here.
    spec = P(rows or None, tokens, *[None] * (x.ndim - 2))
    return jax.lax.with_sharding_constraint(x, spec)


def keep_slots_apart(
    cache: Shaped[Array, "L B S K E"],
) -> Shaped[Array, "L B S K E"]:
    """Pins a cache whose few heads `tensor` does not divide to a cut of its slots.

    Left to itself, the compiler cuts such heads along their width, as the product that
    makes them is cut, and gathers every layer's cache for each token. Cut by slots, a
    device attends to its own, and only what the softmax adds up is sent.

    Returns:
      The cache itself where `tensor` divides the heads, or does not divide the slots.
    """
    shards = free_axes().get(COLUMN_AXIS, 1)
    _, B, S, K, _ = cache.shape
    if K % shards == 0 or S % shards:
        return cache
    spec = P(None, row_axes(B) or None, COLUMN_AXIS, None, None)
    return jax.lax.with_sharding_constraint(cache, spec)
