"""What both Pallas backends do to their inputs: resets and narrow streams.

A reset rides in the sign of the gate: e = -g where the state is set to zero first. So a
kernel reads one array for both, and whatever makes the gate makes e in the same pass.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import refusal_of_dtypes

Array = jax.Array


def sign_gate(gate: Array, starts: Array | None, period: int | None) -> Array:
    """Returns e [B, T, D]: -g at `starts` and at positions period, 2 period, ...

    A gate of 0 becomes the smallest normal number there, so that it has a sign: 1 - g
    is the same, and nothing else of g is used where the state is reset.
    """
    resets = starts
    if period is not None:
        t = jnp.arange(gate.shape[1])
        regular = ((t > 0) & (t % period == 0))[None]
        resets = regular if resets is None else resets | regular
    if resets is None:
        return gate
    least = jnp.finfo(gate.dtype).tiny
    return jnp.where(resets[..., None], -jnp.maximum(gate, least), gate)


def read_signed(e: Array, *, signed: bool) -> tuple[Array, Array, Array | None]:
    """Returns (g, the factor of the state before, where it is reset or None)."""
    if not signed:
        return e, e, None
    return jnp.abs(e), jnp.maximum(e, 0.0), e < 0


def refusal_of_streams(gate: Array, values: tuple[Array, ...]) -> str | None:
    """Returns which dtype the kernels do not compute in, None when they do."""
    for v in values:
        reason = refusal_of_dtypes(
            {"gate": gate, "values": v}, jnp.float32, jnp.bfloat16
        )
        if reason is not None:
            return reason
    return None


def narrowest(gate: Array, values: tuple[Array, ...]) -> int:
    """Returns the width of the narrowest stream."""
    return min(v.shape[2] for v in values)
