"""A decode step's products on a GPU are the products of any other device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.target import Target, as_if
from recurjax.layers.attention import merge
from recurjax.layers.linear import AdaptedWeight, apart, apart_by_layer, linear
from recurjax.model import Decoder
from recurjax.types import Tokens
from recurjax.variants.recurformer import MambaConfig, RecurFormerConfig
from tests.compiling import QUICK_COMPILE, all_compiled_quickly
from tests.marks import slow_except
from tests.plan.small_experiments import VARIANTS, experiment
from tests.tolerances import assert_values_close

H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), "float32")


def on_gpu_and_here(function, *arguments):
    """Returns what a function computes as traced for a GPU, and as for this device."""
    # A function of its own for each: jax keeps what it has traced.
    there, here = (
        jax.jit(lambda *a: function(*a), compiler_options=QUICK_COMPILE)
        for _ in range(2)
    )
    with as_if(H100):
        result = there(*arguments)
    return result, here(*arguments)


@pytest.mark.parametrize("rows, tokens", [(1, 1), (2, 1), (9, 1), (2, 3)])
@pytest.mark.parametrize("added", [False, True])
def test_heads_are_merged_to_the_same_sum_and_gradients(rows, tokens, added):
    y, weight, bias = drawn(rows, tokens, 4, 8), drawn(4, 8, 16), drawn(16)
    if added:
        weight = AdaptedWeight(base=weight, lora_a=drawn(32, 2), lora_b=drawn(2, 16))

    def value_and_gradients(y, weight, bias):
        out, pull = jax.vjp(merge, y, weight, bias)
        return out, pull(jnp.cos(out))

    there, here = on_gpu_and_here(value_and_gradients, y, weight, bias)
    assert_values_close(there, here)


def products(x: jax.Array) -> list[jax.Array]:
    return [jnp.sin(x) for x in apart(x, 3)]


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_few_rows_products_and_gradients_are_those_of_any_device(rows):
    x, weight = drawn(rows, 1, 8), drawn(8, 16)

    def value_and_gradients(x, weight):
        y, pull = jax.vjp(linear, x, weight)
        return y, pull(jnp.cos(y))

    there, here = on_gpu_and_here(value_and_gradients, x, weight)
    assert there[0].shape == (rows, 1, 16)
    assert_values_close(there, here)


def test_a_gpu_multiplies_at_least_eight_rows_of_one_token():
    def multiplied(x: jax.Array) -> int:
        traced = jax.make_jaxpr(lambda x: linear(x, jnp.ones((4, 5))))(x)
        (product,) = [e for e in traced.eqns if e.primitive.name == "dot_general"]
        return product.invars[0].aval.shape[-2]

    with as_if(H100):
        assert [multiplied(drawn(rows, 1, 4)) for rows in (1, 3, 8, 9)] == [8, 8, 8, 9]
        assert multiplied(drawn(1, 3, 4)) == 3
    assert multiplied(drawn(1, 1, 4)) == 1


@pytest.mark.parametrize("shape", [(4, 5), (5, 6), (6, 4)])
def test_a_gpu_computes_a_step_in_halves_of_the_inputs(shape):
    x, weight = drawn(3, 1, shape[0]), drawn(*shape)
    there, here = on_gpu_and_here(linear, x, weight)
    assert_values_close(there, here)


def test_layers_that_read_one_x_are_kept_apart():
    def layers(x, own):
        return [jnp.sin(apart_by_layer(x, y)) for y in own]

    def barriers() -> int:
        own = [drawn(2, 1, 4)] * 3
        return str(jax.make_jaxpr(layers)(drawn(2, 1, 4), own)).count("barrier")

    with as_if(H100):
        assert barriers() == 3
    assert barriers() == 0


def test_only_one_token_a_row_on_a_gpu_is_kept_apart():
    def barriers(x: jax.Array) -> int:
        return str(jax.make_jaxpr(products)(x)).count("optimization_barrier")

    with as_if(H100):
        assert barriers(drawn(2, 1, 4)) == 1
        assert barriers(drawn(2, 3, 4)) == 0
        assert barriers(drawn(1, 1, 4)) == 1
    assert barriers(drawn(2, 1, 4)) == 0


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "variant",
    slow_except(
        ("transformer", "recurrent_transformer"),
        [*VARIANTS, "recurformer"],
        slow=["rat"],
    ),
)
def test_a_model_s_decode_step_is_the_same_for_a_gpu(variant, rows):
    with all_compiled_quickly():
        model = drawn_model(variant)
        prompt = Tokens(
            jnp.arange(12).reshape(2, 6)[:rows] % 7, lengths=jnp.array([6, 4])[:rows]
        )
        cache = model.init_cache(rows, SLOTS)
        _, cache, _ = jax.jit(lambda t, c: model.prefill(t, c))(prompt, cache)
        newest = Tokens(jnp.array([[3], [5]])[:rows], lengths=jnp.ones(rows, jnp.int32))
        there, here = on_gpu_and_here(model.hidden, newest, cache)
        assert_values_close(there, here)


SLOTS = 80
"""More than a part of one row's sums, and no multiple of it."""


def drawn_model(variant: str) -> Decoder:
    """Makes a model of two layers none of whose weights is zero, as some begin."""
    model = experiment(
        "transformer" if variant == "recurformer" else variant, "float32"
    ).model
    stack: Any = model.stack
    if variant == "recurformer":
        mamba = MambaConfig(state=3, dt_rank=2)
        stack = RecurFormerConfig(transformer=stack, replaced=((0,), ()), mamba=mamba)
    if variant == "latent_recurrent_transformer":
        # Every layer multiplies the same memory and the same input by its own weights.
        memory = replace(stack.memory, projection="layerwise")
        stack = replace(stack, memory=memory, value_residual="projected")
    decoder = Decoder(replace(model, stack=stack), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda w: w + jnp.asarray(rng.normal(0, 0.05, w.shape), w.dtype), decoder
    )


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_bfloat16_products_are_those_of_float32_rounded_once(rows):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 1, 48)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(48, 16)), jnp.bfloat16)
    y, back = jax.vjp(linear, x, w)
    assert y.dtype == jnp.bfloat16 and y.shape == (rows, 1, 16)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-5)
    dx, dw = back(y)
    assert dx.shape == x.shape and dw.shape == w.shape
