"""Mixers of other papers in the pattern: what each computes, its costs, its mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mamba import MambaWeights, mamba_flops, mamba_weights
from recurjax.parameters import parameter_name, to_nested_dict
from recurjax.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from recurjax.types import Tokens
from recurjax.variants.rat import presets
from recurjax.variants.rat.config import mixing_flops
from recurjax.variants.rat.mixers import make_mixer, mixer_cost
from tests.laws import B, T, quick
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.variants.rat.switches import MAMBA, SWITCHES, VOCABULARY, WIDTH, build


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_beside_mamba", "rat_beside_mamba"])
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)], ids=str)
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
