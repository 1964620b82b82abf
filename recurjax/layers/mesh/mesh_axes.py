"""What a stack says of the axes of a mesh that only some variants can use.

Every variant runs over `data`, `fsdp` and `tensor`: rows and parameters are cut, and
what does not divide is replicated. `stage` and `sequence` cut the computation itself,
so a stack either has a program for them or must refuse them.
"""

from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from recurjax.layers.mesh.sequence_axis import SEQUENCE_AXIS

STAGE_AXIS = "stage"


class UncutStack(nnx.Module):
    """A stack without a program for stages of layers or for parts of rows."""

    config: Any

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Says why it cannot train on a mesh, or None; the length does not matter."""
        variant = type(self.config).__name__
        return refuse_stages(mesh, variant) or refuse_sequence(mesh, variant)


def refuse_stages(mesh: Mesh | AbstractMesh, variant: str) -> str | None:
    """Says why a stack without a pipeline over layers cannot run on the mesh, or None.

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
    """Says why a stack that needs whole rows cannot run on the mesh, or None.

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
