"""TPU path: Pallas kernels lowered by Mosaic, one forward and two for the gradient."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.chunk_attention.arrays import (
    Array,
    ChunkEnds,
    at_least_one,
    operands,
)
from pallas_kernels.chunk_attention.block_sizes import BlockSizes, choose
from pallas_kernels.chunk_attention.mosaic_backward import (
    end_gradients,
    position_gradients,
)
from pallas_kernels.chunk_attention.mosaic_forward import attend
from pallas_kernels.chunk_attention.mosaic_launch import (
    Call,
    choose_tiles,
    document_arrays,
    refusal_of_tiles,
)
from pallas_kernels.dispatch import refusal_of_dtypes, refusal_of_one_position
from pallas_kernels.target import refusal_of_mosaic_tpu


def supported(q, *arrays, **options) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    # One position is bound by reading the ends, which XLA reads out of a stack of
    # layers where they lie; for a kernel it would copy the layer first.
    reason = refusal_of_mosaic_tpu() or refusal_of_one_position(q)
    return reason or expressible(q, *arrays, **options)


def expressible(
    q, own_logits, own_values, ends, first, documents, *, chunk, scale, blocks=None
) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    reason = refusal_of_dtypes(operands(q, own_values, ends), jnp.float32, jnp.bfloat16)
    if reason is not None:
        return reason
    E = q.shape[3]
    if E % 8 or E > 256:
        return f"head width must be a multiple of 8 up to 256, got {E}"
    arrays = (q, own_logits, ends, first, documents)
    blocks = choose("mosaic_tpu", *arrays, chunk=chunk, blocks=blocks)
    reason = blocks.refusal_beyond("block_q", "block_k")
    if reason is not None or not blocks.given():
        return reason
    S = ends.keys.shape[2]
    call = _call(q, own_logits, S, documents, chunk, scale, False, blocks)
    return refusal_of_tiles(call, q.dtype.itemsize)


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
    interpret: Any = False,
    blocks: BlockSizes | None = None,
):
    """Returns (o [B, T, H, E], log-sum-exp [B, H, 1, T]).

    Args:
      interpret: True, or pltpu.InterpretParams for the TPU's own semantics.
      blocks: sizes; None: measured ones; what is None in them is the heuristic's.
    """
    T, S = q.shape[1], ends.keys.shape[2]
    arrays = (q, own_logits, ends, first, documents)
    blocks = choose("mosaic_tpu", *arrays, chunk=chunk, blocks=blocks)
    ends = at_least_one(ends)
    q, own_logits, own_values, documents = _at_least_eight(
        q, own_logits, own_values, documents
    )
    call = _call(q, own_logits, S, documents, chunk, scale, interpret, blocks)
    o, lse = attend(
        call,
        _first(first, call),
        document_arrays(ends, documents),
        *(q, _by_head(own_logits), own_values, ends.keys, ends.values),
    )
    return o[:, :T], lse


def backward(
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    ends: ChunkEnds,
    first: Int[Array, " B"] | None,
    documents: Int[Array, "B T"] | None,
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B H 1 _"],  # of 8 positions at least
    do: Float[Array, "B T H E"],
    *,
    chunk: int,
    scale: float,
    interpret: Any = False,
    blocks: BlockSizes | None = None,
):
    """Returns gradients of (q, own_logits, own_values, keys, values)."""
    T, S = q.shape[1], ends.keys.shape[2]
    arrays = (q, own_logits, ends, first, documents)
    blocks = choose("mosaic_tpu", *arrays, chunk=chunk, blocks=blocks)
    ends = at_least_one(ends)
    q, own_logits, own_values, documents, o, do = _at_least_eight(
        q, own_logits, own_values, documents, o, do
    )
    call = _call(q, own_logits, S, documents, chunk, scale, interpret, blocks)
    first = _first(first, call)
    known = document_arrays(ends, documents)
    keys, values, lse = ends.keys, ends.values, lse
    dq, d_own_logits, d_own_values, delta = position_gradients(
        *(call, first, known, q, _by_head(own_logits), own_values, keys, values),
        *(o, lse, do),
    )
    d_keys, d_values = end_gradients(
        call, first, known, q, keys, values, lse, delta, do
    )
    d_own_logits = d_own_logits[:, :, 0].swapaxes(1, 2)
    of_positions = (x[:, :T] for x in (dq, d_own_logits, d_own_values))
    return *of_positions, d_keys[:, :, :S], d_values[:, :, :S]


def _call(
    q: Array,
    own_logits: Array,
    ends: int,
    documents: Array | None,
    chunk: int,
    scale: float,
    interpret,
    blocks: BlockSizes,
) -> Call:
    B, T, N, E = q.shape
    return Call(
        batch=B,
        length=T,
        groups=N,
        heads=own_logits.shape[2],
        width=E,
        ends=ends,
        chunk=chunk,
        scale=scale,
        has_documents=documents is not None,
        tiles=choose_tiles(length=T, ends=max(ends, 1), blocks=blocks),
        interpret=interpret,
    )


def _at_least_eight(*arrays) -> list:
    """Adds zeros up to 8 positions, the rows of a register: less cannot be multiplied.

    Nothing flows back through them: their gradient of o is zero.
    """
    missing = [0 if x is None else max(0, 8 - x.shape[1]) for x in arrays]
    return [
        jnp.pad(x, ((0, 0), (0, n), *[(0, 0)] * (x.ndim - 2))) if n else x
        for x, n in zip(arrays, missing, strict=True)
    ]


def _first(first: Array | None, call: Call) -> Array:
    zeros = jnp.zeros(call.batch, jnp.int32)
    return zeros if first is None else first.astype(jnp.int32)


def _by_head(own_logits: Array) -> Array:
    return own_logits.astype(jnp.float32).swapaxes(1, 2)[:, :, None]
