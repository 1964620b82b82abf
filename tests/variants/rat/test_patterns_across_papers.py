"""Mixers of other papers in the pattern: what each computes, its costs, its mesh."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mamba import MambaWeights, mamba_flops, mamba_weights
from recurjax.layers.position import LearnedPositions, Rope
from recurjax.parameters import from_nested_dict, parameter_name, to_nested_dict
from recurjax.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from recurjax.types import Tokens
from recurjax.variants.rat import presets
from recurjax.variants.rat.config import mixing_flops
from recurjax.variants.rat.mixers import make_mixer
from recurjax.variants.rat.recurrent_layer import as_stack
from recurjax.variants.rat.stack import mixer_cost
from tests.laws import B, T, draw_ids, in_pieces, quick
from tests.marks import slow_except
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat.switches import (
    MAMBA,
    RT,
    SWITCHES,
    VOCABULARY,
    WIDTH,
    build,
    small,
)


def without_mlp(model):
    """Returns a model whose MLPs write zeros."""
    return jax.tree_util.tree_map_with_path(
        lambda path, w: 0 * w if parameter_name(path).endswith("mlp.w_down") else w,
        model,
    )


def by_loops(w: MambaWeights, x: np.ndarray) -> np.ndarray:
    """One row of Mamba, position by position, in float64."""
    (taps, I), N, R = w.w_conv.shape, w.a_log.shape[1], w.w_dt.shape[0]
    u, z = x @ w.w_u, x @ w.w_z
    past = np.concatenate([np.zeros((taps - 1, I)), u])
    h, rows = np.zeros((I, N)), []
    for t in range(len(x)):
        v = silu((past[t : t + taps] * w.w_conv).sum(0) + w.b_conv)
        dt, b, c = np.split(v @ w.w_x, [R, R + N])
        step = np.log1p(np.exp(dt @ w.w_dt + w.b_dt))[:, None]
        h = np.exp(-step * np.exp(w.a_log)) * h + step * v[:, None] * b
        rows.append((h @ c + w.skip * v) * silu(z[t]) @ w.w_back)
    return np.stack(rows)


def silu(x):
    return x / (1 + np.exp(-x))


def test_a_pattern_of_mamba_is_its_loops():
    model = without_mlp(build(SWITCHES["mamba"]))
    x = np.random.default_rng(3).normal(size=(B, T, WIDTH))

    @quick
    def run(stack, x):
        tokens = Tokens(jnp.zeros(x.shape[:2], jnp.int32))
        return stack(x, stack.init_cache(B, 0, x.dtype), tokens)[0]

    got = run(model.stack, jnp.asarray(x, jnp.float32))
    block = to_nested_dict(model.stack)["blocks"]["0"]
    for layer in range(model.config.stack.layers):
        scale = np.asarray(block["mixer_norm"]["scale"][layer], np.float64)
        weights = MambaWeights(
            *(
                np.asarray(block["mixer"]["mamba"][name][layer], np.float64)
                for name in MambaWeights._fields
            )
        )
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
        x = x + np.stack([by_loops(weights, row) for row in normed])
    assert_values_close(got, x.astype(np.float32))


def test_costs_of_mamba_by_hand():
    """6 a weight and 27 a state; states and inputs in float32, whatever T is."""
    mamba, D = presets.mamba(width=64), 64
    assert (mamba.dt_rank, mamba.expand * D) == (4, 128)
    weights = 3 * 64 * 128 + 128 * (4 + 2 * 16) + 4 * 128 + 4 * 128
    assert mamba.weights(D) == mamba_weights(mamba, D) == weights
    flops = 6 * weights + 27 * 128 * 16
    assert mixing_flops(mamba, D, 10) == mamba_flops(mamba, D) == flops
    costs = [mixer_cost(mamba, width=D, length=length) for length in (10, 1000)]
    assert costs[0] == costs[1] and costs[0].flops == flops
    # Two counters of 32 bits stand next to the states.
    assert costs[0].cache_bytes == 4 * 128 * (4 + 16) + 2 * 4
    attention = presets.attention(width=D, heads=4)
    stack = presets.stack(attention, mamba, layers=6, width=D)
    mixing = 3 * (flops + mixing_flops(attention, D, 10))
    assert stack.flops_per_token(10) == mixing + 6 * 6 * 8 * D * D


def test_mambas_output_weight_starts_as_every_mixers():
    """`init.output` scales what writes to the residual stream."""
    build = partial(make_mixer, MAMBA, WIDTH, layer=0, layers=1, rngs=nnx.Rngs(0))
    mamba = to_nested_dict(build(init=InitConfig(output="zero")))["mamba"]
    assert not np.any(mamba["w_back"]) and np.all(mamba["w_u"])


RT_LAYERS = {
    "the_paper": {},
    "grouped_rope_blocks_biases": {
        "key_heads": 2,
        "position": Rope(base=100.0),
        "block": 3,
        "qkv_bias": True,
        "out_bias": True,
        "residual_scale": "one",
        "normed_persistent": False,
        "qk_norm": None,
    },
}


@pytest.mark.parametrize(
    "switch",
    [
        pytest.param("the_paper", marks=pytest.mark.slow),
        "grouped_rope_blocks_biases",
    ],
)
def test_a_pattern_of_rts_layer_is_the_recurrent_transformer(switch):
    """Logits and gradients of training, and logits on a cache, from equal weights."""
    place = dataclasses.replace(RT, **RT_LAYERS[switch])
    config = small(place, layers=3)
    model, ids = build(config), draw_ids(VOCABULARY)
    stack = as_stack(place, config.stack)
    nested = to_nested_dict(model)
    nested["stack"]["blocks"] = nested["stack"]["blocks"]["0"]
    like = dataclasses.replace(config, stack=stack)
    theirs = from_nested_dict(jax.eval_shape(lambda: build(like)), nested)
    assert config.flops_per_token(T) == like.flops_per_token(T)

    @quick
    @partial(jax.value_and_grad, has_aux=True)
    def pull(model):
        logits, _ = model(Tokens(jnp.asarray(ids)), model.init_cache(B, 0))
        return jnp.sum(logits**2), logits

    (_, got), gradients = pull(model)
    (_, want), their_gradients = pull(theirs)
    assert_values_close(got, want)
    assert_gradients_close(jax.tree.leaves(gradients), jax.tree.leaves(their_gradients))
    parts, cache = in_pieces(model, ids, (5, 1, 1, 5, 1))
    assert_values_close(parts, in_pieces(theirs, ids, (5, 1, 1, 5, 1))[0])
    # Nothing but RT's own pairs is kept.
    other = theirs.init_cache(B, T)
    assert sum(x.size for x in jax.tree.leaves(cache.groups[0][:5])) == sum(
        x.size for x in jax.tree.leaves(other[:5])
    )


def test_costs_of_rts_layer_by_hand():
    """Keys and values projected twice, 12 H E a key seen; a cache as attention's."""
    layer, D, T = presets.recurrent(width=64, heads=4), 64, 10
    assert layer.weights(D) == 6 * D * D
    assert mixing_flops(layer, D, T) == 6 * 6 * D * D + 12 * D * T
    cost = mixer_cost(layer, width=D, length=T, dtype="bfloat16")
    # The source of a step's pair, and three counters: written, position, layer.
    assert cost.cache_bytes == 2 * (2 * T * D) + 2 * D + 3 * 4


def test_learned_positions_have_no_table_in_a_pattern():
    message = "RecurrentLayerConfig: position must not be learned"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RT, position=LearnedPositions(length=4))


@pytest.mark.parametrize(
    "name",
    slow_except(
        (),
        ["attention_beside_mamba", "rat_beside_mamba", "attention_beside_rt"],
        slow=["rat_beside_mamba"],
    ),
)
@pytest.mark.parametrize(
    "shape", slow_except((), [(8, 1, 1), (2, 2, 2)], slow=["(2, 2, 2)"])
)
def test_eight_devices_give_what_one_gives(name, shape):
    """Rows over data and fsdp, heads and channels over tensor."""
    model = build(SWITCHES[name])
    draw = np.random.default_rng(5)
    ids = draw.integers(VOCABULARY, size=(8, T)).astype(np.int32)
    weights = draw.normal(size=(8, T, VOCABULARY)).astype(np.float32)

    @quick
    @jax.value_and_grad
    def pull(model, ids):
        logits, _ = model(Tokens(ids), model.init_cache(len(ids), 0))
        return jnp.mean(logits * weights)

    want, want_gradient = pull(model, jnp.asarray(ids))
    mesh = make_mesh(
        MeshConfig(**dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, mesh))
        got, gradient = pull(placed, jax.device_put(ids, batch_sharding(mesh)))
    assert_values_close(got, want)
    assert_gradients_close(to_nested_dict(gradient), to_nested_dict(want_gradient))
