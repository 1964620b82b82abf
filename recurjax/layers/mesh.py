"""Shards activations over a mesh, and names the axes that a stack refuses.

Every variant runs over `data`, `fsdp` and `tensor`: rows and parameters are cut, and
what does not divide is replicated. `stage` and `sequence` cut the computation itself,
so a stack either has a program for them or must refuse them. Which mesh is set around
a call, and which of its axes count, `free_axes` says.
"""

import math
from typing import Generic, TypeVar

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Shaped

from pallas_kernels.mesh_cut import COLUMN_AXIS, ROW_AXES, free_axes, row_axes
from recurjax.types import Array

SEQUENCE_AXIS = "sequence"
STAGE_AXIS = "stage"


_Config = TypeVar("_Config")


class UncutStack(nnx.Module, Generic[_Config]):
    """A stack without a program for stages of layers or for parts of rows."""

    config: _Config

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Returns why it cannot train on a mesh, or None, whatever the length."""
        variant = type(self.config).__name__
        return refuse_stages(mesh, variant) or refuse_sequence(mesh, variant)


def refuse_stages(mesh: Mesh | AbstractMesh, variant: str) -> str | None:
    """Returns why a stack without a pipeline cannot run on the mesh, or None.

    Args:
      mesh: with the axis `stage`.
      variant: what the reader knows the stack by: its config's class.
    """
    # Every mesh has all axes; 1 means that it does not cut this one.
    stages = mesh.shape[STAGE_AXIS]
    if stages == 1:
        return None
    return (
        f"mesh.stage is for pipelines over layers, which {variant} does not have: "
        f"leave it at 1, got {stages}"
    )


def refuse_sequence(mesh: Mesh | AbstractMesh, variant: str) -> str | None:
    """Returns why a stack that needs full rows cannot run on the mesh, or None.

    Args:
      mesh: with the axis `sequence`.
      variant: what the reader knows the stack by: its config's class.
    """
    shards = mesh.shape[SEQUENCE_AXIS]
    if shards == 1:
        return None
    return (
        "mesh.sequence is for stacks of RAT, the RNN and attention by RatConfig, "
        f"which {variant} is not: leave it at 1, got {shards}"
    )


def keep_rows_apart(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
    """Pins activations to the sharding of the batch; axes after B and T are replicated.

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
    # A batch that the devices do not divide is replicated; pinning it would fail.
    if x.shape[0] % shards or x.shape[1] % cut.get(SEQUENCE_AXIS, 1):
        return x
    # None replicates an axis: widths are never sharded here.
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


def sequence_shards() -> int:
    """Returns S, the parts that the mesh cuts every row into."""
    return free_axes().get(SEQUENCE_AXIS, 1)


def as_matrix(x: Shaped[Array, "... N"]) -> Shaped[Array, "... N"]:
    """Joins all axes but the last, unless the tokens of rows are cut.

    [B, T] joined has no cut that keeps each device's tokens on it: the compiler would
    gather them all on every device.
    """
    # For unsharded rows the join is free, and one product of two matrices is fastest.
    return x if sequence_shards() > 1 else x.reshape(-1, x.shape[-1])
