"""What the Pallas kernels read beside x, worked out by XLA in large products."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import (
    Prepared,
    linear,
    place_heads,
    pre_norm,
)
from pallas_kernels.recurrent_prefill.spec import LayerSpec


def queries_and_pairs(x: Array, w: Prepared, spec: LayerSpec):
    """Projects rows [L, T, B, D] into q, temporary k and v, [L, T, B, heads E]."""
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    flat = linear(pre_norm(x, w.attention_norm, spec), w.w_qkv, w.b_qkv)
    q, k, v = jnp.split(flat, [H * E, (H + K) * E], axis=-1)
    q = place_heads(q, w.q_norm, None, spec).reshape(q.shape)
    k = place_heads(k, w.k_norm, None, spec).reshape(k.shape)
    return tuple(part.astype(spec.dtype) for part in (q, k, v))


class Vectors(NamedTuple):
    """Biases and norm parameters as the kernels read them: float32, none missing."""

    b_out: Array
    b_in: Array
    b_down: Array
    b_kv: Array
    attention_norm: tuple[Array, Array]
    mlp_norm: tuple[Array, Array]
    k_norm: tuple[Array, Array]

    @classmethod
    def of(cls, w: Prepared, spec: LayerSpec, width: int) -> "Vectors":
        L = w.w_kv.shape[0]

        def bias(vector: Array | None, size: int) -> Array:
            return (
                jnp.zeros((L, size)) if vector is None else vector.astype(jnp.float32)
            )

        def norm(parameters, size: int) -> tuple[Array, Array]:
            scale, shift = parameters
            scale = jnp.ones((L, size)) if scale is None else scale
            return scale.astype(jnp.float32), bias(shift, size)

        pair = w.w_kv.shape[2]
        source = w.attention_norm if spec.normed_persistent else (None, None)
        return cls(
            b_out=bias(w.b_out, width),
            b_in=bias(w.b_in, w.w_in.shape[2]),
            b_down=bias(w.b_down, width),
            b_kv=bias(w.b_kv, pair),
            attention_norm=norm(source, width),
            mlp_norm=norm(w.mlp_norm, width),
            k_norm=norm(w.k_norm, pair // 2),
        )
