"""A decode step's products on a GPU are the products of any other device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import merge
from recurjax.layers.linear import LowRank, apart
from recurjax.model import Decoder
from recurjax.types import Tokens
from tests.plan.small_experiments import experiment
from tests.tolerances import assert_values_close

H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), "float32")


def on_gpu_and_here(function, *arguments):
    """Returns what a function computes as traced for a GPU, and as for this device."""
    with as_if(H100):
        there = jax.jit(lambda *a: function(*a))(*arguments)
    return there, jax.jit(lambda *a: function(*a))(*arguments)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("added", [False, True])
def test_heads_are_merged_to_the_same_sum_and_gradients(tokens, added):
    y, weight, bias = drawn(2, tokens, 4, 8), drawn(4, 8, 16), drawn(16)
    low_rank = LowRank(drawn(32, 2), drawn(2, 16)) if added else None

    def value_and_gradients(y, weight, bias):
        out, pull = jax.vjp(lambda y, w, b: merge(y, w, b, low_rank), y, weight, bias)
        return out, pull(jnp.cos(out))

    there, here = on_gpu_and_here(value_and_gradients, y, weight, bias)
    assert_values_close(there, here)


def products(x: jax.Array) -> list[jax.Array]:
    return [jnp.sin(x) for x in apart(x, 3)]


def test_only_one_token_each_of_several_rows_on_a_gpu_is_kept_apart():
    def barriers(x: jax.Array) -> int:
        return str(jax.make_jaxpr(products)(x)).count("optimization_barrier")

    with as_if(H100):
        assert barriers(drawn(2, 1, 4)) == 1
        assert barriers(drawn(2, 3, 4)) == 0
        assert barriers(drawn(1, 1, 4)) == 0
    assert barriers(drawn(2, 1, 4)) == 0


@pytest.mark.parametrize("variant", ["rat", "transformer"])
def test_a_model_s_decode_step_is_the_same_for_a_gpu(variant):
    config = experiment(variant, "float32").model
    model = Decoder(config, rngs=nnx.Rngs(0))
    prompt = Tokens(jnp.arange(12).reshape(2, 6) % 7, lengths=jnp.array([6, 4]))
    cache = model.init_cache(2, 32)
    _, cache, _ = jax.jit(lambda t, c: model.prefill(t, c))(prompt, cache)
    newest = Tokens(jnp.array([[3], [5]]), lengths=jnp.array([1, 1]))
    there, here = on_gpu_and_here(model.hidden, newest, cache)
    assert_values_close(there, here)
