"""Calls at a mixer's sizes, as shapes, for `tests/compile_target.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.selective_scan import mosaic_tpu, triton
from pallas_kernels.selective_scan.call import (
    SelectiveScanCall,
    SelectiveScanOptions,
    SelectiveScanOutputs,
)

CHUNK = 16


def scan(backend, way, *, B, T, I=2048, N=16, dtype="bfloat16", starts=False):
    """Returns a pass as a function of arrays, and their shapes.

    Args:
      way: "forward" (nothing is kept), "training" (states are) or "backward".
    """
    shape = jax.ShapeDtypeStruct
    wide, shared = shape((B, T, I), dtype), shape((B, T, N), dtype)
    row, state = shape((I,), jnp.float32), shape((B, I, N), jnp.float32)
    # u, dt, a, b, c, skip, z, dt_bias, initial
    a = shape((I, N), jnp.float32)
    arrays = (wide, wide, a, shared, shared, row, wide, row, state)
    first = shape((B, T), bool) if starts else None

    options = SelectiveScanOptions(chunk=CHUNK)

    def forward(arrays, starts):
        call = SelectiveScanCall(*arrays, starts, options)
        reason = backend.expressible(call)
        assert reason is None, reason
        out, kept = backend.forward(call, residuals=way == "training")
        return (*out,) if kept is None else (*out, kept)

    def backward(arrays, starts, kept, d_out, d_final):
        call = SelectiveScanCall(*arrays, starts, options)
        return backend.backward(call, kept, SelectiveScanOutputs(d_out, d_final))

    if way != "backward":
        return forward, (arrays, first)
    kept = shape((B, -(-T // CHUNK), N, I), jnp.float32)
    return backward, (arrays, first, kept, wide, state)


_gpu = partial(scan, triton, B=8, T=4096)
_tpu = partial(scan, mosaic_tpu, B=8, T=4096)

gpu_forward = partial(_gpu, "forward")
gpu_training = partial(_gpu, "training")
gpu_backward = partial(_gpu, "backward")
gpu_float32_backward = partial(_gpu, "backward", dtype="float32", starts=True)
gpu_long_forward = partial(_gpu, "forward", T=65536)
gpu_row_forward = partial(_gpu, "forward", B=1, T=65536, I=4096, starts=True)
gpu_row_backward = partial(_gpu, "backward", B=1, T=65536, I=4096, starts=True)
tpu_forward = partial(_tpu, "forward")
tpu_training = partial(_tpu, "training")
tpu_backward = partial(_tpu, "backward")
tpu_float32_backward = partial(_tpu, "backward", dtype="float32", starts=True)
tpu_odd_backward = partial(_tpu, "backward", T=1000, I=7424, starts=True)
