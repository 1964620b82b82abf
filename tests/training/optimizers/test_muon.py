"""MuonAdamW against three steps of the authors' optimizer, and its sharding."""

import json
from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from recurjax.model import StackConfig
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.sharding import MeshConfig, make_mesh, shardings
from recurjax.training import program
from recurjax.training.optimizers import MuonAdamW, RunSize, build_optimizer
from recurjax.training.optimizers.muon import (
    matrix_dimensions,
    muon,
    muon_adamw,
    parameter_groups,
)
from recurjax.types import Batch
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.latent_recurrent_transformer.objectives import Interleaved
from recurjax.variants.latent_recurrent_transformer.recurrence import rms
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, load
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.training.tiny_experiment import changed, config
from tests.variants.latent_recurrent_transformer.switches import SWITCHES, build, small

MATRICES = ("wide", "tall", "square", "gate")
ADAM = {"emb": (0.8, 0.95), "scal": (0.96, 0.95)}
CASES = golden_cases("latent_recurrent_transformer/optim_*.npz")


def stacked(case, step, name):
    """The matrices of one group, [n, in, out]: ours are the transposes of torch's."""
    keys = [key for key in case if key.startswith(f"{step}/{name}")]
    return np.stack([case[key].T for key in sorted(keys)])


def table(values):
    return lambda step: jnp.asarray(values)[step]


def by_name(hyper, index, key):
    return table([groups[index][key] for groups in hyper])


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("name", MATRICES)
def test_muon_is_the_authors(path, name):
    case = load(path)
    hyper = json.loads(str(case["hyper"]))
    index = MATRICES.index(name)
    low = "bf16" in path.stem
    optimizer = muon(
        by_name(hyper, index, "lr"),
        momentum=by_name(hyper, index, "momentum"),
        decay=by_name(hyper, index, "weight_decay"),
        dimensions=lambda tree: jax.tree.map(
            lambda _: MuonDimensionNumbers((1,), (2,)), tree
        ),
        dtype=jnp.bfloat16 if low else jnp.float32,
    )
    weights = {"w": jnp.asarray(stacked(case, "p0", name))}
    state = optimizer.init(weights)
    update = jax.jit(optimizer.update)
    for step in (1, 2, 3):
        before = weights["w"]
        changes, state = update(
            {"w": jnp.asarray(stacked(case, f"g{step}", name))}, state, weights
        )
        weights = optax.apply_updates(weights, changes)
        want = stacked(case, f"p{step}", name)
        bound = 2e-2 if low else 2e-5  # of the update, not of the weight
        scale = np.abs(want - np.asarray(before)).max()
        np.testing.assert_allclose(weights["w"], want, rtol=0, atol=bound * scale)
        for ours, theirs in (("momentum", "momentum"), ("second", "second")):
            got = np.asarray(getattr(state, ours)["w"])
            kept = np.swapaxes(case[f"state{step}/{name}_{theirs}"], 1, 2)
            # A square has twice the relative error of what is squared.
            limit = (2 if ours == "second" else 1) * bound * np.abs(kept).max()
            np.testing.assert_allclose(got, kept, rtol=0, atol=limit)


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("name", ADAM)
def test_the_other_groups_are_the_authors(path, name):
    case = load(path)
    hyper = json.loads(str(case["hyper"]))
    index = len(MATRICES) + list(ADAM).index(name)
    rate = by_name(hyper, index, "lr")
    b1, b2 = ADAM[name]
    peak = hyper[0][index]["lr"]
    leaf = {"emb": "w_embedding", "scal": "input_scale"}[name]
    config = MuonAdamW(learning_rate=peak, embedding_rate=peak, scalar_rate=peak)
    optimizer = muon_adamw(config, rate, steps=3, size=RunSize())
    weights = {leaf: jnp.asarray(case[f"p0/{name}"])}
    state = optimizer.init(weights)
    for step in (1, 2, 3):
        before = weights[leaf]
        gradient = {leaf: jnp.asarray(case[f"g{step}/{name}"])}
        changes, state = optimizer.update(gradient, state, weights)
        weights = optax.apply_updates(weights, changes)
        want = case[f"p{step}/{name}"]
        scale = np.abs(want - np.asarray(before)).max()
        np.testing.assert_allclose(weights[leaf], want, rtol=0, atol=1e-5 * scale)
    moments = [s for s in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(s)]
    [kept] = [s for s in moments if jax.tree.leaves(s.mu)]
    for got, key in ((kept.mu, "m"), (kept.nu, "v")):
        want = case[f"state3/{name}_{key}"]
        limit = 1e-5 * np.abs(want).max()
        np.testing.assert_allclose(got[leaf], want, rtol=0, atol=limit)


def _is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def test_every_parameter_has_its_group():
    names = {
        "stack": {
            "blocks": {"attention": {"w_q": 0, "w_value_gate": 0, "w_mix": 0}},
            "memory": {"w_k": 0},
            "residual_scale": 0,
            "input_scale": 0,
            "memory_scale": 0,
        },
        "w_embedding": 0,
        "w_head": 0,
        "final_norm": {"scale": 0},
    }
    groups = parameter_groups(names)
    assert groups == {
        "stack": {
            "blocks": {
                "attention": {
                    "w_q": "matrix",
                    "w_value_gate": "matrix",
                    "w_mix": "matrix",
                }
            },
            "memory": {"w_k": "matrix"},
            "residual_scale": "residual",
            "input_scale": "input",
            "memory_scale": "scalar",
        },
        "w_embedding": "embedding",
        "w_head": "head",
        "final_norm": {"scale": "scalar"},
    }


def test_each_matrix_is_one_from_its_inputs_to_its_outputs():
    shapes = {
        "attention.w_q": (8, 4, 4),  # [D, H, E]
        "attention.w_k": (8, 2, 4),  # [D, K, E]
        "attention.w_v": (8, 2, 4),
        "w_input_v": (8, 2, 4),
        "memory.w_k": (8, 2, 4),
        "w_mix": (8, 2, 3),  # [D, 2, K]
        "w_value_gate": (8, 2),
        "w_out": (4, 4, 8),  # [H, E, D]
        "mlp.w_up": (8, 16),
    }
    weights = {
        f"stack.blocks.0.{name}": jnp.zeros((5, *shape))
        for name, shape in shapes.items()
    }
    result = {
        name.removeprefix("stack.blocks.0."): (d.reduction_axis, d.output_axis)
        for name, d in matrix_dimensions(weights).items()
    }
    heads = ((1,), (2, 3))
    assert result == {
        "attention.w_q": heads,
        "attention.w_k": heads,
        "attention.w_v": heads,
        "w_input_v": heads,
        "memory.w_k": heads,
        "w_mix": heads,
        "w_value_gate": ((1,), (2,)),
        "w_out": ((1, 2), (3,)),
        "mlp.w_up": ((1,), (2,)),
    }


def test_the_memorys_gates_stay_open():
    """Four steps at nanochat's own rates, unscaled, of the gates' weight alone."""
    width, block = 64, "stack.blocks.0"
    one_layer = {"layers": 1, "windows": "L", "value_gate_channels": 0}
    model = build(small(MemoryConfig(sources=(1,)), width=width, **one_layer))
    ids = np.random.default_rng(1).integers(0, 11, (4, 9))
    batch = Batch(jnp.asarray(ids), jnp.asarray(np.roll(ids, -1, axis=1)))
    optimizer = muon_adamw(MuonAdamW(), lambda _: 0.02, steps=100, size=RunSize())

    def loss(weights):
        whole = to_nested_dict(model)
        whole["stack"]["blocks"]["0"] |= weights[block]
        return Interleaved(subsets=1)(from_nested_dict(model, whole), batch)[0]

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def step(weights, state):
        changes, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, changes), state

    weights = {block: {"w_mix": jnp.zeros((1, width, 2, 1))}}
    state = optimizer.init(weights)
    for _ in range(4):
        weights, state = step(weights, state)
    w_mix = weights[block]["w_mix"][0]
    assert np.abs(w_mix).max() > 0
    read = rms(jax.random.normal(jax.random.key(2), (256, width)))
    gates = 2 * jax.nn.sigmoid(jnp.einsum("nd,dgk->ngk", read, w_mix))
    saturated = np.mean((gates < 0.05) | (gates > 1.95))
    assert saturated < 0.01


def test_rates_follow_width_and_batch():
    optimizer = muon_adamw(
        MuonAdamW(),
        lambda _: 0.02,
        steps=10,
        size=RunSize(width=768 // 16, layers=3, tokens=2**17),
    )
    wide, batch = 4, 1 / 2
    rates = {
        "w_embedding": 0.3 * wide * batch,
        "w_head": 0.004 * wide * batch,
        "stack.blocks.0.residual_scale": 0.005 * batch,
    }
    weights = {name: jnp.ones((2, 2)) for name in rates}
    changes, _ = optimizer.update(weights, optimizer.init(weights), weights)
    for name, rate in rates.items():  # Adam's first step is its rate.
        np.testing.assert_allclose(changes[name], -rate, rtol=1e-5)


def adams_changes(gradients, *, b1, rate):
    """Returns Adam's change at each step, in closed form: sums instead of averages."""
    results, b2 = [], 0.95
    for t in range(1, len(gradients) + 1):
        ages = np.arange(t)[::-1]
        seen = np.asarray(gradients[:t])
        m = (1 - b1) * (b1**ages @ seen) / (1 - b1**t)
        v = (1 - b2) * (b2**ages @ seen**2) / (1 - b2**t)
        results.append(-rate * m / (np.sqrt(v) + 1e-10))
    return results


def test_every_group_is_its_closed_form_where_no_factor_is_one():
    """Width 48, 3 layers, 2^17 tokens: the factors are 4, 16 and 1/2."""
    steps, wide, batch, depth = 5, 4.0, 0.5, 16.0
    config = MuonAdamW(
        learning_rate=0.02,
        embedding_rate=0.3,
        head_rate=0.004,
        scalar_rate=0.5,
        weight_decay=0.2,
        momentum=(0.5, 0.9),
        momentum_steps=4,
    )
    scheduled = lambda step: 0.02 * (1 - step / 10)  # noqa: E731
    size = RunSize(width=48, layers=3, tokens=2**17)
    optimizer = muon_adamw(config, scheduled, steps=steps, size=size)
    adams = {
        "w_embedding": (0.8, 0.3 * wide * batch),
        "w_head": (0.8, 0.004 * wide * batch),
        "final_norm.scale": (0.8, 0.5 * batch),
        "stack.blocks.0.residual_scale": (0.8, 0.5 * batch / 100),
        "stack.blocks.0.input_scale": (0.96, 0.5 * batch),
    }
    matrix = "stack.blocks.0.mlp.w_up"
    draw = np.random.default_rng(0).normal
    gradients = [draw(size=4) for _ in range(steps)]
    rotated = draw(size=(steps, 1, 4, 8))
    weights = {name: jnp.ones(4) for name in adams}
    weights[matrix] = w = jnp.asarray(draw(size=(1, 4, 8)), jnp.float32)
    # Muon alone, with the schedules as numbers: rate / 2, decay 16 lambda to 0.
    alone = muon(
        lambda step: batch * scheduled(step),
        momentum=lambda step: 0.5 + 0.4 * step / 4,
        decay=lambda step: 0.2 * depth * (1 - step / steps),
        dimensions=matrix_dimensions,
    )
    state, state_alone = optimizer.init(weights), alone.init({matrix: w})
    update, update_alone = jax.jit(optimizer.update), jax.jit(alone.update)
    for step in range(steps):
        given = {name: jnp.asarray(gradients[step], jnp.float32) for name in adams}
        given[matrix] = jnp.asarray(rotated[step], jnp.float32)
        changes, state = update(given, state, weights)
        only = {matrix: given[matrix]}
        want, state_alone = update_alone(only, state_alone, {matrix: w})
        assert_values_close(changes[matrix], want[matrix])
        for name, (b1, rate) in adams.items():
            rate *= 1 - step / 10
            want_here = adams_changes(gradients, b1=b1, rate=rate)[step]
            np.testing.assert_allclose(changes[name], want_here, rtol=2e-5)


def test_every_variant_says_its_size():
    for kind in get_args(StackConfig):
        assert hasattr(kind, "width") and hasattr(kind, "layers"), kind


def test_the_runs_own_batch_and_model_scale_its_rates(monkeypatch):
    """`--training.batch 32` alone once left every rate at the file's own batch."""
    sizes = []

    def build_and_record(*args, size, **kwargs):
        sizes.append(size)
        return build_optimizer(*args, size=size, **kwargs)

    monkeypatch.setattr(program, "build_optimizer", build_and_record)
    run = replace(config(), optimizer=MuonAdamW())
    mesh = make_mesh(MeshConfig())
    for batch in (8, 32):
        program.build_step(changed(run, training={"batch": batch}), mesh)
    assert sizes == [RunSize(16, 2, 8 * 16), RunSize(16, 2, 32 * 16)]


def whole_update(model, *, mesh=None):
    """One step on every parameter of a model, with gradients of their own size."""
    size = RunSize(width=8, layers=2, tokens=64)
    optimizer = muon_adamw(MuonAdamW(), lambda _: 0.02, steps=10, size=size)

    def update(model):
        gradients = jax.tree.map(lambda w: jnp.sin(7 * w), model)
        return optimizer.update(gradients, optimizer.init(model), model)[0]

    if mesh is not None:
        model = jax.device_put(model, shardings(model, mesh))
    return jax.jit(update, compiler_options=QUICK_COMPILE)(model)


def test_every_parameter_of_a_model_is_moved():
    model = build(SWITCHES["layerwise"])
    changes = whole_update(model)
    assert jax.tree.structure(changes) == jax.tree.structure(model)
    for change in jax.tree.leaves(changes):
        assert np.isfinite(change).all() and np.abs(change).max() > 0


@pytest.mark.slow
def test_matrices_on_eight_devices_get_the_same_update():
    model = build(SWITCHES["layerwise"])
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    assert_gradients_close(whole_update(model, mesh=mesh), whole_update(model))
