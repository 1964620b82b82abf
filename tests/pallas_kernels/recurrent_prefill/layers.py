"""Small layers that between them turn every switch of the op."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent_prefill import LayerSpec, LayerWeights

BATCH, LENGTH, WIDTH, HIDDEN_WIDTH = 2, 13, 8, 12


def spec(**changes) -> LayerSpec:
    """Four heads of width 4 with ALiBi, unless changed."""
    base = {
        "heads": 4,
        "key_heads": 4,
        "head_width": 4,
        "alibi_max_bias": 8.0,
        "logit_scale": 0.5,
        "residual_scale": 0.6,
        "dtype": "float64",
    }
    return LayerSpec(**(base | changes))


SPECS = {
    "alibi": spec(),
    "grouped rope layer norm swiglu biases": spec(
        key_heads=2,
        alibi_max_bias=None,
        rope_base=100.0,
        rope_width=2,
        norm="layer",
        qk_norm="layer",
        activation="silu",
    ),
    "multi query, norm-free, no qk-norm": spec(
        key_heads=1, alibi_max_bias=None, norm="none", qk_norm="none"
    ),
    "un-normed persistent pair": spec(
        normed_persistent=False, activation="relu_squared"
    ),
    "blocks of 3": spec(block=3, activation="gelu_tanh"),
}


def weights(spec: LayerSpec, *, layers: int, dtype="float64") -> LayerWeights:
    """Draws weights; those of a layer norm or a SwiGLU have biases or a gate."""
    draw = np.random.default_rng(0)
    L, D, F = layers, WIDTH, HIDDEN_WIDTH
    H, K, E = spec.heads, spec.key_heads, spec.head_width

    def matrix(*shape):
        return jnp.asarray(0.3 * draw.normal(size=(L, *shape)), dtype)

    def scale(*shape):
        return jnp.asarray(1 + 0.1 * draw.normal(size=(L, *shape)), dtype)

    parts = {
        "w_q": matrix(D, H, E),
        "w_k": matrix(D, K, E),
        "w_v": matrix(D, K, E),
        "w_out": matrix(H, E, D),
        "w_up": matrix(D, F),
        "w_down": matrix(F, D),
    }
    if spec.norm != "none":
        parts |= {"attention_norm_scale": scale(D), "mlp_norm_scale": scale(D)}
    if spec.qk_norm != "none":
        parts |= {"q_norm_scale": scale(H * E), "k_norm_scale": scale(K * E)}
    if spec.norm == "layer":
        parts |= {"attention_norm_bias": matrix(D), "mlp_norm_bias": matrix(D)}
        parts |= {"q_norm_bias": matrix(H * E), "k_norm_bias": matrix(K * E)}
        parts |= {"b_q": matrix(H, E), "b_k": matrix(K, E), "b_v": matrix(K, E)}
        parts |= {"b_out": matrix(D), "b_up": matrix(F), "b_down": matrix(D)}
    if spec.activation == "silu":
        parts |= {"w_gate": matrix(D, F), "b_gate": matrix(F)}
    return LayerWeights(**parts)


def rows(seed: int, length: int = LENGTH) -> np.ndarray:
    """Draws [B, T, D] in float64."""
    return np.random.default_rng(seed).normal(size=(BATCH, length, WIDTH))
