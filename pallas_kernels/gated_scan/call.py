"""A call of the op: a gate or its logits, streams of any width, options, sizes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from pallas_kernels.block_sizes import GivenSizes
from pallas_kernels.dispatch import refusal_of_dtypes

Array = jax.Array


class GateLogits(NamedTuple):
    """A gate by its logits, g = sigmoid(logits + bias), computed in at least float32.

    The scan computes the sigmoid where it reads the logits, so that a product's narrow
    result is all that crosses memory, and gives their gradient in their dtype.

    Attributes:
      logits: logits of the gate, of any floating dtype.
      bias: bias of each channel; None: zero.
    """

    logits: Float[Array, "B T D"]
    bias: Float[Array, " D"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, T, D], as a gate's own."""
        return self.logits.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The logits'."""
        return self.logits.dtype


Gate = Array | GateLogits


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes(GivenSizes):
    """Block sizes of a call; None: the backend chooses.

    Attributes:
      stretch: positions of a stretch. Where it is the chunk, stretches are not linked;
        else the state is reset within them.
      channels: channels of one tile in one program.
      unroll: positions whose inputs are read before the first of them is computed.
    """

    stretch: int | None = None
    channels: int | None = None
    unroll: int | None = None


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True, slots=True)
class GatedScanOptions:
    """The static options of a call.

    Attributes:
      chunk: C: the state is set to zero before positions C, 2 C, ... None: never.
      blocks: sizes of the caller's; the backend chooses what they leave out.
      interpret: runs kernels as plain JAX, on any device; pltpu.InterpretParams: with
        the TPU's own semantics.
    """

    chunk: int | None
    blocks: BlockSizes = BlockSizes()
    interpret: Any = False


class GatedScanCall(NamedTuple):
    """The arguments of every backend; with gradients in place of arrays, its results.

    Queries read the last stream; without them the call is `gated_scan`'s.
    """

    gate: Gate
    values: tuple[Float[Array, "B T _"], ...]
    initial: tuple[Float[Array, "B D"], ...]
    starts: Bool[Array, "B T"] | None
    lengths: Int[Array, " B"] | None
    queries: Float[Array, "B T N E"] | None
    options: GatedScanOptions

    @property
    def head(self) -> int:
        """E, the channels of a head; 0 without queries."""
        return 0 if self.queries is None else self.queries.shape[3]

    @property
    def narrowest(self) -> int:
        """The width of the narrowest stream."""
        return min(v.shape[2] for v in self.values)

    @property
    def period(self) -> int | None:
        """The chunk where there are several in the call, else None."""
        chunk = self.options.chunk
        return None if chunk is None or chunk >= self.gate.shape[1] else chunk


class ScanOutputs(NamedTuple):
    """The results of every backend's forward pass.

    Attributes:
      states: h of each stream in its dtype; of one that is read, its chunks' ends.
      finals: h of each stream after the row's last position, in at least float32.
      logits: what the queries read, in at least float32; None without them.
    """

    states: tuple[Float[Array, "B _ D"], ...]
    finals: tuple[Float[Array, "B D"], ...]
    logits: Float[Array, "B T H"] | None


States = tuple[Float[Array, "B T D"], ...]
"""All states of every stream: what the backward pass reads."""


def array_of(gate: Gate) -> Array:
    """Returns the gate or its logits: what crosses memory."""
    return gate.logits if isinstance(gate, GateLogits) else gate


def gate_of(gate: Gate) -> Array:
    """Returns g [B, T, D]: in at least float32 where logits are given."""
    if not isinstance(gate, GateLogits):
        return gate
    logits = gate.logits.astype(jnp.promote_types(gate.dtype, jnp.float32))
    return jax.nn.sigmoid(logits if gate.bias is None else logits + gate.bias)


def pull_back(gate: Gate, g: Array, dg: Array) -> Gate:
    """Returns the gradient of what was given from that of g."""
    if not isinstance(gate, GateLogits):
        return dg
    d_logits = dg * g * (1 - g)
    bias = None if gate.bias is None else d_logits.sum((0, 1))
    return GateLogits(d_logits, bias)


def as_given(gate: Gate, d_gate: Array, d_bias: Array | None) -> Gate:
    """Returns what kernels give, a bias' gradient with all logits, in `gate`'s form."""
    if not isinstance(gate, GateLogits):
        return d_gate
    return GateLogits(d_gate, None if gate.bias is None else d_bias)


def bias_of(gate: Gate) -> Array | None:
    """Returns what kernels add to logits, float32 [D]; None where the gate is given."""
    if not isinstance(gate, GateLogits):
        return None
    if gate.bias is None:
        return jnp.zeros(gate.shape[2], jnp.float32)
    return gate.bias.astype(jnp.float32)


def find_resets(
    length: int, starts: Array | None, period: int | None
) -> Bool[Array, "#B T"] | None:
    """Returns where the state is set to zero first; None: nowhere.

    Args:
      starts: [B, T], or None.
      period: the state is reset at positions period, 2 period, ... too.
    """
    if period is None:
        return starts
    t = jnp.arange(length)
    regular = ((t > 0) & (t % period == 0))[None]
    return regular if starts is None else starts | regular


def refusal_of_streams(call: GatedScanCall) -> str | None:
    """Returns which dtype the kernels do not compute in, None when they do."""
    arrays = {"gate": array_of(call.gate)}
    arrays |= {f"values[{n}]": v for n, v in enumerate(call.values)}
    if call.queries is not None:
        arrays["queries"] = call.queries
    return refusal_of_dtypes(arrays, jnp.float32, jnp.bfloat16)


def flows_between(stretch: int, length: int, chunk: int | None) -> bool:
    """Returns whether the state flows from one stretch of T positions into the next."""
    return chunk is None or chunk >= length or stretch != chunk
