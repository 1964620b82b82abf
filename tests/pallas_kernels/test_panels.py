"""Products of a few rows with float32 matrices in panels, by the C++ kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import cpu
from pallas_kernels.cpu.panels import multiply, panels_of, serves
from pallas_kernels.target import Target, as_if
from recurjax.layers.mlp import MlpConfig
from recurjax.model import make_stack
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.types import Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.latent_recurrent_transformer.presets import shared
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from tests.compiling import QUICK_COMPILE
from tests.layers.attention.test_cpu import WIDTHS, needs_kernels
from tests.tolerances import assert_gradients_close, assert_values_close

pytestmark = needs_kernels
SIZES = {"a_panel": (70, 64), "part_of_a_panel": (33, 7), "shared_out": (300, 1000)}


def draw(rows: int, inputs: int, outputs: int, *, layers: int = 2):
    """Returns x and W."""
    draws = np.random.default_rng(rows + inputs)
    x = draws.normal(size=(layers, rows, inputs))
    weight = draws.normal(size=(layers, inputs, outputs))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)


@pytest.mark.parametrize("lanes", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_product(size, lanes, monkeypatch):
    """Any number of rows; a row's sums do not depend on the others."""
    if lanes is not None:
        monkeypatch.setattr(cpu, "lanes", lambda: lanes)
    x, weight = draw(17, *SIZES[size])
    panels, columns = panels_of(weight), weight.shape[-1]
    product = partial(multiply, panels=panels, columns=columns)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    assert_values_close(product(x), expected)
    for rows in range(1, 10):
        np.testing.assert_array_equal(product(x[:, :rows]), product(x)[:, :rows])


def make(config):
    """Returns a stack, its input and tokens."""
    stack = make_stack(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (3, 37, 64))
    return stack, x, Tokens(jnp.zeros(x.shape[:2], jnp.int32))


def recurrent(layers: int) -> RecurrentTransformerConfig:
    return RecurrentTransformerConfig(
        layers=layers,
        width=64,
        heads=4,
        key_heads=2,
        head_width=16,
        mlp=MlpConfig(width=96, kind="swiglu"),
        schedule="wavefront" if layers > 1 else "prefix",
    )


def latent() -> LatentRecurrentTransformerConfig:
    return LatentRecurrentTransformerConfig(
        layers=4,
        width=64,
        heads=4,
        key_heads=4,
        head_width=16,
        mlp_width=96,
        vocabulary=32,
        length=37,
        windows="SL",
        memory=shared(4),
    )


def compiled(function, *arguments):
    """Returns how often a program calls the kernel, and what it returns."""
    # A function of its own, which jax has not traced before.
    made = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments)
    calls = made.as_text().count("custom_call @recurjax_panels")
    return calls, made.compile(compiler_options=QUICK_COMPILE)(*arguments)


@pytest.mark.parametrize("layers", [1, 3])
def test_both_passes_of_a_recurrent_transformer_multiply_by_it(layers, monkeypatch):
    stack, x, tokens = make(recurrent(layers))

    def loss(stack, x):
        z, _ = stack(x, stack.init_cache(len(x), 0, x.dtype), tokens)
        return jnp.sum(z**2), z

    passes = jax.grad(loss, argnums=(0, 1), has_aux=True)
    calls, (gradients, z) = compiled(passes, stack, x)
    assert calls == 8
    monkeypatch.setattr("pallas_kernels.cpu.panels.serves", lambda *_, **__: False)
    calls, (expected, expected_z) = compiled(passes, stack, x)
    assert calls == 0
    assert_values_close(z, expected_z)
    assert_gradients_close(gradients, expected)


@pytest.mark.slow
def test_the_exact_recurrence_of_a_latent_memory_multiplies_by_it(monkeypatch):
    """Its gradient is the one through XLA's products."""
    stack, x, tokens = make(latent())

    def exact(stack, x):
        return stack(x, stack.init_cache(len(x), x.shape[1], x.dtype), tokens)[0]

    def loss(stack, x):
        return jnp.sum(exact(stack, x) ** 2)

    calls, y = compiled(exact, stack, x)
    _, gradients = compiled(jax.grad(loss, argnums=(0, 1)), stack, x)
    # Six matrices of each place in the pattern.
    assert calls == 12
    monkeypatch.setattr("pallas_kernels.cpu.panels.serves", lambda *_, **__: False)
    calls, expected = compiled(exact, stack, x)
    _, expected_gradients = compiled(jax.grad(loss, argnums=(0, 1)), stack, x)
    assert calls == 0
    assert_values_close(y, expected)
    assert_gradients_close(gradients, expected_gradients)


def test_what_it_leaves_to_xla():
    _, weight = draw(8, 64, 96)
    assert serves(weight, rows=8)
    assert not serves(weight, rows=65)
    assert not serves(weight.astype(jnp.bfloat16), rows=8)
    assert not serves(weight[:, :32], rows=8)
    with jax.set_mesh(make_mesh(MeshConfig(data=4, tensor=2))):
        assert not serves(weight, rows=8)
    with as_if(Target(platform="tpu", kind="TPU v5e")):
        assert not serves(weight, rows=8)
