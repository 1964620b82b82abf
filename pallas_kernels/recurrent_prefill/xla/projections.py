"""From rows to queries and pairs, laid out as the XLA path's loops read them."""

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import (
    Prepared,
    linear,
    place_heads,
    pre_norm,
)
from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.xla.pairs import Pairs, from_rows


def queries_and_pairs(x: Array, w: Prepared, turn, spec: LayerSpec):
    """Projects rows [L, T, B, D] into queries [L, B, K, G, T, E] and own pairs."""
    flat = linear(pre_norm(x, w.attention_norm, spec), w.w_qkv, w.b_qkv)
    placed = place_projections(flat, w.q_norm, w.k_norm, turn, spec)
    return jax.tree.map(lambda part: part.astype(spec.dtype), placed)


def place_projections(flat: Array, q_norm, k_norm, turn, spec: LayerSpec):
    """Turns rows of w_qkv's output into queries and pairs, still wide."""
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    q, k, v = jnp.split(flat, [H * E, (H + K) * E], axis=-1)
    q = place_heads(q, q_norm, turn, spec)
    q = jnp.moveaxis(q.reshape(*q.shape[:3], K, H // K, E), 1, 4)
    k = place_heads(k, k_norm, turn, spec)
    return q, from_rows(k, v.reshape(k.shape))


def pairs_of(k: Array, v: Array, w: Prepared, turn, spec: LayerSpec) -> Pairs:
    """Turns projections [L, T, B, K E] into pairs."""
    k = place_heads(k, w.k_norm, turn, spec).astype(spec.dtype)
    return from_rows(k, v.reshape(k.shape).astype(spec.dtype))
