"""GPU path: Pallas kernels lowered by Triton, one forward and two for the gradient."""

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.chunk_attention.call import (
    Array,
    ChunkAttentionCall,
    at_least_one,
)
from pallas_kernels.chunk_attention.triton_backward import (
    end_gradients,
    position_gradients,
)
from pallas_kernels.chunk_attention.triton_forward import attend
from pallas_kernels.chunk_attention.triton_launch import Launch, refusal_of_tiles
from pallas_kernels.dispatch import refusal_of_dtypes, refusal_of_one_position
from pallas_kernels.target import refusal_of_triton

_WIDEST = 256


def supported(call: ChunkAttentionCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    # One position is bound by reading the ends, which XLA reads out of a stack of
    # layers in place; for a kernel it would copy the layer first.
    reason = refusal_of_triton() or refusal_of_one_position(call.q)
    return reason or expressible(call)


def expressible(call: ChunkAttentionCall) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    dtypes = jnp.float32, jnp.bfloat16, jnp.float16
    reason = refusal_of_dtypes(call.operands, *dtypes)
    if reason is not None:
        return reason
    E = call.q.shape[3]
    if E < 16 or E > _WIDEST or E & (E - 1):
        return f"head width must be a power of two from 16 to {_WIDEST}, got {E}"
    if not call.options.blocks.given():
        return None
    launch = Launch.of(call)
    return refusal_of_tiles(
        launch.tiles,
        per_group=launch.heads // launch.groups,
        width=E,
        itemsize=call.q.dtype.itemsize,
    )


def forward(
    call: ChunkAttentionCall, *, residuals: bool
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Returns o and the log-sum-exp."""
    del residuals  # The kernel has the log-sum-exp at hand.
    launch = Launch.of(call)
    return attend(launch, call._replace(ends=at_least_one(call.ends)))


def backward(
    call: ChunkAttentionCall,
    residuals: tuple[Float[Array, "B T H E"], Float[Array, "B H T"]],
    cotangents: Float[Array, "B T H E"],
) -> ChunkAttentionCall:
    """Returns the call's gradients, each in the place of its array."""
    launch, (o, lse), do = Launch.of(call), residuals, cotangents
    d_ends = call.ends[:2]  # Without elements, their own gradients.
    padded = call._replace(ends=at_least_one(call.ends))
    parts, d_own_logits, d_own_values, delta = position_gradients(
        launch, padded, o, lse, do
    )
    dq = parts[0] if parts.shape[0] == 1 else jnp.sum(parts, axis=0)
    if launch.ends:
        d_ends = end_gradients(launch, padded, lse, delta, do)
    return call.with_gradients(dq, d_own_logits, d_own_values, *d_ends)
