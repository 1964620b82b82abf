"""Calls at the paper's sizes, as shapes, for `tests/compile_target.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.chunk_attention import ChunkEnds, mosaic_tpu, triton, xla
from pallas_kernels.chunk_attention.call import (
    ChunkAttentionCall,
    ChunkAttentionOptions,
)

CHUNK = 16
HEADS, WIDTH, GROUPS = 16, 128, 2


def call(backend, *, batch, length, train=False, decode=False, dtype="bfloat16"):
    """Returns a function of the call's arrays, and its arguments: C 16.

    Training has every chunk's end, as RAT gives them; `decode` gives one position of
    every row a cache of `length` tokens.
    """
    B, T, H, E = batch, 1 if decode else length, HEADS, WIDTH
    S = length // CHUNK
    shape = partial(jax.ShapeDtypeStruct, dtype=dtype)
    # As the projections give them: heads side by side.
    arrays = (
        shape((B, T, GROUPS * E)),
        jax.ShapeDtypeStruct((B, T, H), jnp.float32),
        shape((B, T, H * E)),
        shape((B, H, S, E)),
        shape((B, H, S, E)),
    )
    options = ChunkAttentionOptions(chunk=1 if decode else CHUNK, scale=E**-0.5)

    def run(q, own_logits, own_values, keys, values, rest):
        q, own_values = q.reshape(B, T, GROUPS, E), own_values.reshape(B, T, H, E)
        first = rest if decode else None
        ends = ChunkEnds(keys, values)
        call = ChunkAttentionCall(q, own_logits, own_values, ends, first, None, options)
        if backend is not xla:
            reason = backend.expressible(call)
            assert reason is None, reason
        o, lse = backend.forward(call, residuals=train)
        if not train:
            return o.reshape(B, T, -1)
        do = rest.reshape(o.shape)
        gradients = jax.tree.leaves(backend.backward(call, (o, lse), do))
        return [
            x.reshape(like.shape)
            for x, like in zip((o, *gradients), shapes, strict=True)
        ]

    shapes = (arrays[2], *arrays)
    rest = shape((B, T, H * E)) if train else jax.ShapeDtypeStruct((B,), jnp.int32)
    return run, (*arrays, rest)


gpu_forward = partial(call, triton, batch=64, length=4096)
gpu_training = partial(call, triton, batch=64, length=4096, train=True)
gpu_small_batch = partial(call, triton, batch=1, length=4096, train=True)
gpu_long = partial(call, triton, batch=1, length=262144, train=True)
gpu_float32 = partial(call, triton, batch=4, length=4096, train=True, dtype="float32")
gpu_decode = partial(call, triton, batch=64, length=4096, decode=True)
gpu_decode_xla = partial(call, xla, batch=64, length=4096, decode=True)
gpu_decode_one_row = partial(call, xla, batch=1, length=65536, decode=True)
tpu_forward = partial(call, mosaic_tpu, batch=64, length=4096)
tpu_training = partial(call, mosaic_tpu, batch=64, length=4096, train=True)
tpu_long = partial(call, mosaic_tpu, batch=1, length=262144, train=True)
tpu_decode = partial(call, mosaic_tpu, batch=64, length=4096, decode=True)
