"""The layer's parts as the definition uses them: norm, heads with positions, MLP."""

from functools import partial

import jax
import jax.numpy as jnp


def norm(y, scale, bias, spec, name):
    """RMSNorm, LayerNorm or nothing over the last axis, then scale and bias."""
    kind, eps = getattr(spec, name), getattr(spec, f"{name}_eps")
    if kind != "none":
        y = y - y.mean(-1, keepdims=True) if kind == "layer" else y
        y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def heads(n, weight, bias, scale, shift, at, spec):
    """Projects n [B, T, D] into heads, qk-normalised over all of them and rotated."""
    y = jnp.einsum("btd,dhe->bthe", n, weight)
    y = y if bias is None else y + bias
    flat = y.reshape(*y.shape[:2], -1)
    y = norm(flat, scale, shift, spec, "qk_norm").reshape(y.shape)
    if spec.rope_base is None:
        return y
    half = spec.rope_width // 2
    angle = at[:, None] * spec.rope_base ** (-jnp.arange(half) / half)
    c, s = (f(angle)[:, None].astype(y.dtype) for f in (jnp.cos, jnp.sin))
    a, b, rest = jnp.split(y, [half, 2 * half], axis=-1)
    return jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def mlp(n, w, activation):
    """act(n W_up) W_down, or (act(n W_gate) * (n W_up)) W_down."""
    act = {
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu_squared": lambda u: jnp.square(jax.nn.relu(u)),
        "silu": jax.nn.silu,
    }[activation]
    h = _linear(n, w.w_up, w.b_up)
    h = act(h) if w.w_gate is None else act(_linear(n, w.w_gate, w.b_gate)) * h
    return _linear(h, w.w_down, w.b_down)


def _linear(n, weight, bias):
    return n @ weight if bias is None else n @ weight + bias


def pair(n, w, at, spec):
    """Returns the keys and values that rows n [B, T, D] at positions `at` give."""
    v = jnp.einsum("btd,dke->btke", n, w.w_v)
    k = heads(n, w.w_k, w.b_k, w.k_norm_scale, w.k_norm_bias, at, spec)
    return k, v if w.b_v is None else v + w.b_v
