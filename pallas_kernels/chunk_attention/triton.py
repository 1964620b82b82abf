"""GPU path: Pallas kernels lowered by Triton, one forward and two for the gradient."""

import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.chunk_attention.arrays import (
    Array,
    ChunkEnds,
    at_least_one,
    operands,
)
from pallas_kernels.chunk_attention.block_sizes import BlockSizes, choose
from pallas_kernels.chunk_attention.triton_backward import (
    end_gradients,
    position_gradients,
)
from pallas_kernels.chunk_attention.triton_forward import attend
from pallas_kernels.chunk_attention.triton_launch import (
    Call,
    choose_tiles,
    mask_arrays,
    refusal_of_tiles,
)
from pallas_kernels.dispatch import refusal_of_dtypes, refusal_of_one_position
from pallas_kernels.target import refusal_of_triton

_WIDEST = 256


def supported(q, *arrays, **options) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    # One position is bound by reading the ends, which XLA reads out of a stack of
    # layers where they lie; for a kernel it would copy the layer first.
    reason = refusal_of_triton() or refusal_of_one_position(q)
    return reason or expressible(q, *arrays, **options)


def expressible(
    q, own_logits, own_values, ends, first, documents, *, chunk, scale, blocks=None
) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    reason = refusal_of_dtypes(
        operands(q, own_values, ends), jnp.float32, jnp.bfloat16, jnp.float16
    )
    if reason is not None:
        return reason
    E = q.shape[3]
    if E < 16 or E > _WIDEST or E & (E - 1):
        return f"head width must be a power of two from 16 to {_WIDEST}, got {E}"
    arrays = (q, own_logits, ends, first, documents)
    blocks = choose("triton", *arrays, chunk=chunk, blocks=blocks)
    if not blocks.given():
        return None
    call = _call(*arrays, chunk, scale, False, blocks)
    return refusal_of_tiles(
        call.tiles,
        per_group=call.heads // call.groups,
        width=E,
        itemsize=q.dtype.itemsize,
    )


def forward(
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    ends: ChunkEnds,
    first: Int[Array, " B"] | None,
    documents: Int[Array, "B T"] | None,
    *,
    chunk: int,
    scale: float,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
):
    """Returns (o [B, T, H, E], log-sum-exp [B, H, T]).

    Args:
      interpret: runs the kernels as plain JAX, on any device.
      blocks: sizes; None: measured ones; what is None in them is the heuristic's.
    """
    call = _call(q, own_logits, ends, first, documents, chunk, scale, interpret, blocks)
    ends = at_least_one(ends)
    masks = mask_arrays(ends, first, documents)
    return attend(call, masks, q, own_logits, own_values, ends.keys, ends.values)


def backward(
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    ends: ChunkEnds,
    first: Int[Array, " B"] | None,
    documents: Int[Array, "B T"] | None,
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H E"],
    *,
    chunk: int,
    scale: float,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
):
    """Returns gradients of (q, own_logits, own_values, keys, values)."""
    call = _call(q, own_logits, ends, first, documents, chunk, scale, interpret, blocks)
    d_ends = (ends.keys, ends.values)  # Without elements, their own gradients.
    ends = at_least_one(ends)
    masks = mask_arrays(ends, first, documents)
    keys, values = ends.keys, ends.values
    parts, d_own_logits, d_own_values, delta = position_gradients(
        call,
        masks,
        *(q, own_logits, own_values, keys, values, o, lse, do),
    )
    dq = parts[0] if parts.shape[0] == 1 else jnp.sum(parts, axis=0)
    if call.ends:
        d_ends = end_gradients(call, masks, q, keys, values, lse, delta, do)
    return dq, d_own_logits, d_own_values, *d_ends


def _call(
    q: Array,
    own_logits: Array,
    ends: ChunkEnds,
    first: Array | None,
    documents: Array | None,
    chunk: int,
    scale: float,
    interpret: bool,
    blocks: BlockSizes | None,
) -> Call:
    B, T, N, E = q.shape
    H = own_logits.shape[2]
    arrays = (q, own_logits, ends, first, documents)
    tiles = choose_tiles(
        batch=B,
        length=T,
        heads=H,
        groups=N,
        width=E,
        wide=q.dtype == jnp.float32,
        blocks=choose("triton", *arrays, chunk=chunk, blocks=blocks),
    )
    return Call(
        batch=B,
        length=T,
        groups=N,
        heads=H,
        width=E,
        ends=ends.keys.shape[2],
        chunk=chunk,
        scale=scale,
        has_first=first is not None,
        has_documents=documents is not None,
        tiles=tiles,
        interpret=interpret,
    )
