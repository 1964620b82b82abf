"""What comes in: a gate or its logits, where states are reset, streams of any width."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from pallas_kernels.dispatch import refusal_of_dtypes

Array = jax.Array


class GateLogits(NamedTuple):
    """A gate by its logits, g = sigmoid(logits + bias), computed in at least float32.

    The scan computes the sigmoid where it reads the logits, so that a product's narrow
    result is all that crosses memory, and gives their gradient in their dtype.

    Attributes:
      logits: of any floating dtype.
      bias: of each channel; None: zero.
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


def refusal_of_streams(
    gate: Gate, values: tuple[Array, ...], queries: Array | None
) -> str | None:
    """Returns which dtype the kernels do not compute in, None when they do."""
    arrays = {"gate": array_of(gate)}
    arrays |= {f"values[{n}]": v for n, v in enumerate(values)}
    if queries is not None:
        arrays["queries"] = queries
    return refusal_of_dtypes(arrays, jnp.float32, jnp.bfloat16)


def narrowest(values: tuple[Array, ...]) -> int:
    """Returns the width of the narrowest stream."""
    return min(v.shape[2] for v in values)
