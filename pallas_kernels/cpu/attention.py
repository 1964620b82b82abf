"""Causal attention by the C++ kernels: a backend of `attend_in_bands`.

One program computes a tile of 64 queries of one head and reads each tile of keys that
they see once, skipping those that causality, a window or documents hide. The backward
pass takes a key head at a time and computes logits again. Sums are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import cpu

_WIDEST = 256


def supported(call: Any) -> str | None:
    """Returns why the kernels cannot run a call, None if they can."""
    q, k, v = call.q, call.k, call.v
    if not q.dtype == k.dtype == v.dtype:
        return f"needs one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    soft_cap = call.options.soft_cap
    return refusal(q.shape[3], q.dtype, soft_cap=soft_cap) or cpu.refusal()


def refusal(head_width: int, dtype: Any, *, soft_cap: float | None) -> str | None:
    """Returns why the kernels know no such call, on any processor, or None."""
    if soft_cap is not None:
        return "a soft cap is not supported"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"dtype must be float32 or bfloat16, got {dtype}"
    if head_width > _WIDEST:
        return f"head width must be at most {_WIDEST}, got {head_width}"
    return None


def forward(
    call: Any, *, residuals: bool
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Returns o and the log-sum-exp of the logits, in base 2."""
    del residuals
    B, T, H, _ = call.q.shape
    lse = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    arrays, options = _inputs(call)
    return cpu.call("attention_forward", (_like(call.q), lse), *arrays, **options)


def backward(call: Any, residuals: Any, cotangents: Float[Array, "B T H E"]) -> Any:
    """Returns gradients in place of the arrays, that of the slopes zero."""
    (o, lse), do = residuals, cotangents.astype(call.q.dtype)
    results = (_like(call.q), _like(call.k), _like(call.v))
    arrays, options = _inputs(call)
    dq, dk, dv = cpu.call("attention_backward", results, *arrays, o, lse, do, **options)
    slopes = None if call.slopes is None else jnp.zeros_like(call.slopes)
    return call._replace(q=dq, k=dk, v=dv, segments=None, slopes=slopes)


def _inputs(call: Any) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Returns a call's arrays, those that it has not empty, and the static options."""
    nothing = jnp.zeros((0,))
    segments = nothing if call.segments is None else call.segments
    slopes = nothing if call.slopes is None else call.slopes
    arrays = (segments.astype(jnp.int32), slopes.astype(jnp.float32))
    T, window = call.q.shape[1], call.options.window
    options = {
        "scale": float(call.options.scale),
        "window": T if window is None else min(window, T),
    }
    return (call.q, call.k, call.v, *arrays), options


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
