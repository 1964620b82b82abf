"""The paper's theory, executed."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_prefill import (
    LayerSpec,
    LayerWeights,
    empty_cache,
    recurrent_prefill,
)
from recurjax.variants.recurrent_transformer.theory import (
    concentrate_on_previous,
    cycle_count,
    embed,
    live,
    simplified_gradient,
    simplified_layer,
    simulate_transformer,
)
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_values_close

WIDTH, HEADS, LAYERS, LENGTH = 6, 2, 3, 9
SPEC = LayerSpec(
    heads=HEADS,
    key_heads=HEADS,
    head_width=3,
    norm="none",
    qk_norm="none",
    logit_scale=3**-0.5,
    residual_scale=1.0,
    dtype="float64",
)


def test_three_widths_of_it_simulate_a_transformer_layer_by_layer():
    """Every layer's activations; a Transformer is the recurrence with one block."""
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)

        def matrix(*shape):
            return jnp.asarray(0.5 * draw.normal(size=(LAYERS, *shape)))

        heads = (WIDTH, HEADS, SPEC.head_width)
        w = LayerWeights(
            w_q=matrix(*heads),
            w_k=matrix(*heads),
            w_v=matrix(*heads),
            w_out=matrix(*heads[1:], WIDTH),
            w_up=matrix(WIDTH, 10),
            w_down=matrix(10, WIDTH),
        )
        x = jnp.asarray(draw.normal(size=(2, LENGTH, WIDTH)))
        transformer = dataclasses.replace(SPEC, block=LENGTH)

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        def activations(x, w):
            theirs, ours, wide = x, embed(x), simulate_transformer(w)
            matches = []
            for layer in range(LAYERS):
                cut = lambda leaf, i=layer: leaf[i : i + 1]  # noqa: E731
                theirs = run(theirs, jax.tree.map(cut, w), transformer)
                ours = run(ours, jax.tree.map(cut, wide), SPEC)
                matches.append((live(ours, layer), theirs))
            return matches

        for got, want in activations(x, w):
            assert_values_close(got, want, "float64")


def test_what_cannot_be_simulated_is_named():
    w = LayerWeights(
        *(jnp.zeros((1, 2, 2, 2)) for _ in range(6)), b_up=jnp.zeros((1, 2))
    )
    with pytest.raises(ValueError, match="b_up"):
        simulate_transformer(w)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_gradient_of_the_simplified_layer_is_the_theorems(k):
    with jax.enable_x64(True):
        draw = np.random.default_rng(1)
        v, x = (
            jnp.asarray(draw.normal(size=(4, 4))),
            jnp.asarray(draw.normal(size=(5, 4))),
        )
        alpha = 0.7
        last = lambda x: simplified_layer(x, v, alpha)[k - 1]  # noqa: E731
        got = jax.jacobian(last)(x)[:, 0]
        assert_values_close(got, simplified_gradient(v, alpha, k), "float64")


def test_cycles_of_all_permutations_add_up():
    assert [cycle_count(4, r) for r in range(6)] == [0, 6, 11, 6, 1, 0]


def test_attention_on_the_previous_position_is_a_token_recurrence():
    with jax.enable_x64(True):
        draw = np.random.default_rng(2)
        v, up, down = (
            jnp.asarray(0.5 * draw.normal(size=shape))
            for shape in ((4, 4), (4, 8), (8, 4))
        )
        x = jnp.asarray(draw.normal(size=(2, LENGTH, 4)))
        spec = dataclasses.replace(
            SPEC,
            heads=1,
            key_heads=1,
            head_width=5,
            logit_scale=1.0,
            alibi_max_bias=-6.0,  # a slope of 2^6
        )
        w = concentrate_on_previous(v, up, down, strength=200.0)
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, 1)))
        z = jax.jit(partial(run, spec=spec), compiler_options=QUICK_COMPILE)(padded, w)
        state, want = jnp.zeros((2, 4)), []
        for x_i in jnp.moveaxis(x, 1, 0):
            y = x_i + state @ v.T
            if not want:
                y = x_i + x_i @ v.T  # the first position has only itself to attend to
            state = y + jax.nn.gelu(y @ up, approximate=False) @ down
            want.append(state)
        assert_values_close(z[..., :4], jnp.stack(want, axis=1), "float64")
        assert_values_close(z[..., 4], jnp.ones((2, LENGTH)), "float64")


def run(x, w, spec):
    cache = empty_cache(w.w_q.shape[0], x.shape[0], 0, x.shape[2], spec)
    return recurrent_prefill(x, w, cache, spec=spec)[0]
