"""TPU path: Pallas kernels lowered by Mosaic, one forward and two for the gradient."""

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.chunk_attention.call import Array, ChunkAttentionCall
from pallas_kernels.chunk_attention.mosaic_backward import (
    end_gradients,
    position_gradients,
)
from pallas_kernels.chunk_attention.mosaic_forward import attend
from pallas_kernels.chunk_attention.mosaic_launch import (
    Inputs,
    Launch,
    at_least_eight,
    refusal_of_tiles,
)
from pallas_kernels.dispatch import refusal_of_dtypes, refusal_of_one_position
from pallas_kernels.target import refusal_of_mosaic_tpu


def supported(call: ChunkAttentionCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    # One position is bound by reading the ends, which XLA reads out of a stack of
    # layers in place; for a kernel it would copy the layer first.
    reason = refusal_of_mosaic_tpu() or refusal_of_one_position(call.q)
    return reason or expressible(call)


def expressible(call: ChunkAttentionCall) -> str | None:
    """Returns why the kernels cannot compute a call on any device, or None."""
    reason = refusal_of_dtypes(call.operands, jnp.float32, jnp.bfloat16)
    if reason is not None:
        return reason
    E = call.q.shape[3]
    if E % 8 or E > 256:
        return f"head width must be a multiple of 8 up to 256, got {E}"
    blocks = call.options.blocks
    reason = blocks.refusal_beyond("block_q", "block_k")
    if reason is not None or not blocks.given():
        return reason
    return refusal_of_tiles(Launch.of(call), call.q.dtype.itemsize)


def forward(
    call: ChunkAttentionCall, *, residuals: bool
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H 1 _"]]:
    """Returns o, and the log-sum-exp of at least 8 positions."""
    del residuals  # The kernel has the log-sum-exp at hand.
    o, lse = attend(Launch.of(call), Inputs.of(call))
    return o[:, : call.q.shape[1]], lse


def backward(
    call: ChunkAttentionCall,
    residuals: tuple[Float[Array, "B T H E"], Float[Array, "B H 1 _"]],
    cotangents: Float[Array, "B T H E"],
) -> ChunkAttentionCall:
    """Returns gradients in place of the arrays."""
    T, S = call.q.shape[1], call.ends.keys.shape[2]
    launch, inputs, lse = Launch.of(call), Inputs.of(call), residuals[1]
    o, do = at_least_eight(residuals[0]), at_least_eight(cotangents)
    *gradients, delta = position_gradients(launch, inputs, o, lse, do)
    d_keys, d_values = end_gradients(launch, inputs, lse, delta, do)
    dq, d_own_logits, d_own_values = gradients
    d_own_logits = d_own_logits[:, :, 0].swapaxes(1, 2)
    of_positions = (x[:, :T] for x in (dq, d_own_logits, d_own_values))
    return call.with_gradients(*of_positions, d_keys[:, :, :S], d_values[:, :, :S])
