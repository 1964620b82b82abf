import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import Mlp, MlpConfig, linear
from recurjax.parameters import to_nested_dict
from tests.tolerances import assert_values_close

X = np.random.default_rng(0).normal(size=(2, 3, 4))
ERF = np.vectorize(math.erf)


def gelu(x):
    return x * 0.5 * (1 + ERF(x / np.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "swiglu": silu,
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_each_kind_is_its_formula(kind, bias):
    config = MlpConfig(kind=kind, width=6, bias=bias)
    like = jax.eval_shape(
        lambda: Mlp(config, 4, InitConfig(), layer=0, layers=1, rngs=nnx.Rngs(0))
    )
    draw = np.random.default_rng(1)
    mlp = jax.tree.map(lambda leaf: jnp.float32(draw.normal(size=leaf.shape)), like)
    w = {name: np.float64(leaf) for name, leaf in to_nested_dict(mlp).items()}
    assert set(w) == {
        f"{part}_{name}"
        for part in ("w", "b")[: 1 + bias]
        for name in ("up", "gate", "down")
        if name != "gate" or kind in ("swiglu", "geglu", "geglu_tanh")
    }

    def affine(x, name):
        return x @ w[f"w_{name}"] + w.get(f"b_{name}", 0)

    hidden = ACTIVATIONS[kind](affine(X, "gate" if "w_gate" in w else "up"))
    if "w_gate" in w:
        hidden = hidden * affine(X, "up")
    assert_values_close(jax.jit(type(mlp).__call__)(mlp, X), affine(hidden, "down"))


def test_a_bias_gradient_adds_up_in_float32():
    """4099 ones: bfloat16 has no such number."""
    x = jnp.ones((1, 4099, 1), jnp.bfloat16)
    weight, bias = nnx.Param(jnp.ones((1, 1))), nnx.Param(jnp.zeros(1))
    gradient = jax.jit(
        jax.grad(lambda b: jnp.sum(linear(x, weight, b), dtype="float32"))
    )
    assert gradient(bias)[...] == 4099


def test_no_width_is_an_error():
    with pytest.raises(ValueError, match=r"MlpConfig\.width: must be >= 1, got 0"):
        MlpConfig(width=0)
