import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recurjax.model import Decoder
from recurjax.parameters import to_nested_dict
from recurjax.training.optimizers import Adam, AdamW, build_optimizer
from recurjax.training.optimizers.optimizer import is_weight
from tests.training.tiny_experiment import config


def rate(step):
    return 0.1 / (step + 1)


def draw(seed, scale=1.0):
    w, b = np.random.default_rng(seed).standard_normal((2, 4)).astype(np.float32)
    return {"mlp.w_up": w * scale, "mlp.b_up": b * scale}


def by_optax(optimizer, gradients):
    parameters = jax.tree.map(jnp.asarray, draw(0))
    state = optimizer.init(parameters)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters


def by_hand(gradients, *, decay, clip=None, b1=0.9, b2=0.95, eps=1e-8):
    """AdamW as in Loshchilov and Hutter 2019, algorithm 2, in float64."""
    x = {k: v.astype(np.float64) for k, v in draw(0).items()}
    m = {k: np.zeros(4) for k in x}
    v = {k: np.zeros(4) for k in x}
    for t, gradient in enumerate(gradients, start=1):
        g = {k: value.astype(np.float64) for k, value in gradient.items()}
        norm = np.sqrt(sum((value**2).sum() for value in g.values()))
        factor = 1.0 if clip is None else min(1.0, clip / norm)
        for k in x:
            m[k] = b1 * m[k] + (1 - b1) * g[k] * factor
            v[k] = b2 * v[k] + (1 - b2) * (g[k] * factor) ** 2
            step = m[k] / (1 - b1**t) / (np.sqrt(v[k] / (1 - b2**t)) + eps)
            x[k] = x[k] - rate(t - 1) * (step + decay[k] * x[k])
    return x


def assert_same(got, want):
    for k in want:
        np.testing.assert_allclose(got[k], want[k], rtol=2e-5, atol=1e-6)


GRADIENTS = [draw(seed) for seed in (1, 2, 3)]


def test_adamw_is_the_papers_and_spares_biases():
    optimizer = build_optimizer(
        AdamW(learning_rate=1.0, weight_decay=0.3), rate, clip=None, steps=1
    )
    want = by_hand(GRADIENTS, decay={"mlp.w_up": 0.3, "mlp.b_up": 0.0})
    assert_same(by_optax(optimizer, GRADIENTS), want)


def test_decay_of_all_spares_nothing():
    optimizer = build_optimizer(
        AdamW(learning_rate=1.0, weight_decay=0.3, decay="all"),
        rate,
        clip=None,
        steps=1,
    )
    want = by_hand(GRADIENTS, decay={"mlp.w_up": 0.3, "mlp.b_up": 0.3})
    assert_same(by_optax(optimizer, GRADIENTS), want)


def test_adam_does_not_decay_and_takes_its_own_constants():
    optimizer = build_optimizer(
        Adam(learning_rate=1.0, b1=0.8, b2=0.99, eps=1e-3), rate, clip=None, steps=1
    )
    none = {"mlp.w_up": 0.0, "mlp.b_up": 0.0}
    want = by_hand(GRADIENTS, decay=none, b1=0.8, b2=0.99, eps=1e-3)
    assert_same(by_optax(optimizer, GRADIENTS), want)


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clipping_scales_the_whole_gradient_to_its_norm(scale):
    gradients = [draw(seed, scale) for seed in (1, 2, 3)]
    optimizer = build_optimizer(
        Adam(learning_rate=1.0, eps=0.1), rate, clip=1.0, steps=1
    )
    none = {"mlp.w_up": 0.0, "mlp.b_up": 0.0}
    want = by_hand(gradients, decay=none, clip=1.0, eps=0.1)
    assert_same(by_optax(optimizer, gradients), want)


def test_a_models_norms_and_biases_do_not_decay_and_its_embedding_does():
    abstract = jax.eval_shape(
        lambda key: Decoder(config().model, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    decays = to_nested_dict(is_weight(abstract))
    block = decays["stack"]["blocks"]["0"]
    assert decays["w_embedding"] is True
    assert set(block["attention"]) == {"w_q", "w_k", "w_v", "w_out"}
    assert all(block["attention"].values()) and all(block["mlp"].values())
    norms = (block["attention_norm"], block["mlp_norm"], decays["final_norm"])
    assert all(norm == {"scale": False} for norm in norms)
