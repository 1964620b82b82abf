"""A call of the op: its arrays and options, and the block sizes that it may ask for."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from pallas_kernels.block_sizes import GivenSizes
from pallas_kernels.dispatch import refusal_of_dtypes

Array = jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """Block sizes of a call; None: the backend chooses.

    Attributes:
      channels: channels of one program; on a GPU, of the forward pass.
      backward_channels: channels of one program of the GPU's backward pass.
      unroll: positions in a turn of a kernel's or XLA's loop; on a GPU the forward
        pass's, whose inputs are read while those before them are computed.
      backward_unroll: positions whose states are in registers at once on the way back.
      stretch: positions of a row that one GPU program walks, rounded up to full chunks.
    """

    channels: int | None = None
    backward_channels: int | None = None
    unroll: int | None = None
    backward_unroll: int | None = None
    stretch: int | None = None


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveScanOptions:
    """The static options of a call.

    Attributes:
      chunk: positions between two kept states.
      blocks: sizes of the caller's; the backend chooses what they leave out.
      interpret: runs the TPU's kernels as plain JAX, on any device;
        pltpu.InterpretParams: with the TPU's own semantics.
    """

    chunk: int
    blocks: BlockSizes = BlockSizes()
    interpret: Any = False


class SelectiveScanCall(NamedTuple):
    """The arguments of every backend; with gradients in place of arrays, its results.

    Padding has a step of 0 already, which leaves the state as it is: no backend knows
    of lengths.
    """

    u: Float[Array, "B T I"]
    dt: Float[Array, "B T I"]
    a: Float[Array, "I N"]
    b: Float[Array, "B T N"]
    c: Float[Array, "B T N"]
    skip: Float[Array, " I"] | None
    z: Float[Array, "B T I"] | None
    dt_bias: Float[Array, " I"] | None
    initial: Float[Array, "B I N"]
    starts: Bool[Array, "B T"] | None
    options: SelectiveScanOptions


class SelectiveScanOutputs(NamedTuple):
    """The results of the recurrence.

    Attributes:
      y: in u's dtype.
      final: h after the row's last position, in at least float32.
    """

    y: Float[Array, "B T I"]
    final: Float[Array, "B I N"]


def refusal_of_arrays(call: SelectiveScanCall) -> str | None:
    """Returns why no kernel takes these arrays, whatever the device; None: one can."""
    if call.skip is None or call.z is None or call.dt_bias is None:
        return "needs skip, z and dt_bias, as a Mamba mixer gives them"
    names = ("u", "dt", "b", "c", "z")
    arrays = {name: getattr(call, name) for name in names}
    return refusal_of_dtypes(arrays, jnp.float32, jnp.bfloat16)


def refusal_of_unroll(name: str, unroll: int, chunk: int) -> str | None:
    """Returns why a kernel's loop over a chunk cannot have such turns, or None."""
    if chunk % unroll == 0:
        return None
    return f"{name} must divide chunk={chunk}, got {unroll}"
