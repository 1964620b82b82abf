import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.losses.cross_entropy import at_targets, token_losses
from recurjax.model import ModelConfig
from recurjax.parameters import to_nested_dict
from recurjax.types import IGNORED
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.training.tiny_experiment import config, drawn

jit = partial(jax.jit, compiler_options=QUICK_COMPILE)
B, T, V, W = 2, 6, 13, 16
TARGETS = np.array([[0, 12, IGNORED, 3, 7, 12], [IGNORED, 5, 5, 1, 0, 11]])

MODELS = {
    "tied, capped, padded": {
        "tied_head": True,
        "logit_soft_cap": 3.0,
        "pad_vocabulary_to": W,
    },
    "untied, plain": {"tied_head": False},
}


def case(name):
    model = dataclasses.replace(config().model, vocabulary=V, **MODELS[name])
    x = np.random.default_rng(1).standard_normal((B, T, 16)).astype(np.float32)
    return drawn(model, scale=2.0), jnp.asarray(x)


def dense(model, x):
    """-log softmax(cap(x W))[target] and log sum exp, from the definition."""
    config: ModelConfig = model.config
    head = model.w_embedding[...].T if config.tied_head else model.w_head[...]
    logits = x @ head
    if config.logit_soft_cap is not None:
        logits = config.logit_soft_cap * jnp.tanh(logits / config.logit_soft_cap)
    log_normalizer = jnp.log(jnp.exp(logits[..., :V]).sum(-1))
    chosen = (logits * jax.nn.one_hot(TARGETS, logits.shape[-1])).sum(-1)
    counted = TARGETS != IGNORED
    nats = jnp.where(counted, log_normalizer - chosen, 0)
    return nats, jnp.where(counted, log_normalizer, 0)


def differentiate(losses, model, x):
    """Values, and gradients of a sum with a weight of its own for each position."""
    weights = np.random.default_rng(2).standard_normal((2, B, T)).astype(np.float32)

    def weighted(model, x):
        values = losses(model, x)
        return sum((w * v).sum() for w, v in zip(weights, values, strict=True)), values

    gradient = jax.grad(weighted, argnums=(0, 1), has_aux=True)
    (by_model, by_x), values = jit(gradient)(model, x)
    return tuple(values), (to_nested_dict(by_model), by_x)


# 3 divides neither 13 nor 16; 16 and 20 make chunks of padding only.
@pytest.mark.parametrize(
    "name, several",
    [("tied, capped, padded", (1, 3, 16)), ("untied, plain", (1, 2, 20))],
)
def test_chunks_and_one_piece_are_the_dense_formula(name, several):
    model, x = case(name)
    values, gradients = differentiate(dense, model, x)
    for chunks in several:
        losses = partial(token_losses, targets=jnp.asarray(TARGETS), chunks=chunks)
        got, got_gradients = differentiate(losses, model, x)
        assert_values_close(got, values)
        assert_gradients_close(got_gradients, gradients)


def test_chunks_agree_with_one_piece_in_bfloat16():
    model, x = case("tied, capped, padded")
    targets = jnp.asarray(TARGETS)
    x = x.astype(jnp.bfloat16)
    one, two = (jit(partial(token_losses, chunks=n))(model, x, targets) for n in (1, 2))
    assert one.nats.dtype == two.nats.dtype == jnp.float32
    assert_values_close(two, one)


def test_huge_logits_overflow_nowhere():
    model, x = case("untied, plain")
    targets = jnp.asarray(TARGETS)
    for chunks in (1, 3):
        losses = jit(partial(token_losses, chunks=chunks))(model, 1e4 * x, targets)
        assert np.isfinite(losses.nats).all()
        assert np.isfinite(losses.log_normalizer).all()


def test_ignored_positions_are_zero_in_both_values():
    model, x = case("untied, plain")
    losses = jit(token_losses)(model, x, jnp.asarray(TARGETS))
    assert (np.asarray(losses.nats)[TARGETS == IGNORED] == 0).all()
    assert (np.asarray(losses.log_normalizer)[TARGETS == IGNORED] == 0).all()
    assert (np.asarray(losses.nats)[TARGETS != IGNORED] > 0).all()


@pytest.mark.parametrize("most", [5, 9])
def test_logits_at_the_targets_only_give_the_same_loss_and_gradient(most):
    model, x = case("untied, plain")

    def mean(model, x, *, gather):
        targets = jnp.asarray(TARGETS)
        if gather:
            x, targets = at_targets(x, targets, most)
        return token_losses(model, x, targets).nats.sum()

    want, got = (
        jit(jax.value_and_grad(partial(mean, gather=gather), argnums=(0, 1)))(model, x)
        for gather in (False, True)
    )
    assert_values_close(got[0], want[0])
    for first, other in zip(got[1], want[1], strict=True):
        assert_gradients_close(first, other)


def test_a_row_with_more_targets_than_there_is_room_for_is_no_loss():
    x, targets = at_targets(jnp.ones((2, 6, 3)), jnp.asarray(TARGETS), 5)
    assert targets[1].tolist() == [5, 5, 1, 0, 11] and not jnp.isnan(x).any()
    x, _ = at_targets(jnp.ones((1, 6, 3)), jnp.zeros((1, 6), jnp.int32), 5)
    assert jnp.isnan(x).all()
