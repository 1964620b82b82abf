import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recurjax.losses.cross_entropy import token_losses
from recurjax.model import Decoder
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import AdamW, build_optimizer
from recurjax.training.spikes import SpikeConfig, new_spike_state
from recurjax.training.step import TrainState, train_step
from recurjax.types import IGNORED, Batch
from tests.tolerances import assert_gradients_close, assert_values_close
from tests.training.tiny_experiment import config, drawn

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL = dataclasses.replace(
    config().model,
    vocabulary=11,
    stack=dataclasses.replace(config().model.stack, layers=1),
)
OPTIMIZER = build_optimizer(
    AdamW(learning_rate=1.0), lambda step: 0.01, clip=1.0, steps=1
)
SPIKES = SpikeConfig(window=4, sigma=4.0)
POISON = 10  # A batch that begins with this token has a loss that is not a number.


def poisoned(model, batch):
    """The next token from the last one alone: quick to compile without the stack."""
    x = model.final_norm(model.w_embedding[...][batch.ids])
    nats = token_losses(model, x, batch.targets).nats.sum()
    loss = nats / jnp.maximum((batch.targets != IGNORED).sum(), 1)
    loss = loss * jnp.where(batch.ids[0, 0] == POISON, jnp.nan, 1.0)
    return loss, {"loss": loss}


def start(spikes=SPIKES):
    model = drawn(MODEL, scale=0.3)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        optimizer=OPTIMIZER.init(model),
        spikes=new_spike_state(spikes),
    )


def batch(seed=0, first=0):
    ids = np.random.default_rng(seed).integers(0, 10, (8, 12))
    ids[0, 0] = first
    targets = np.roll(ids, -1, axis=1)
    targets[:, -1] = IGNORED
    return Batch(jnp.asarray(ids), jnp.asarray(targets))


@pytest.fixture(scope="module")
def step(quick_compilation):
    by_name = {
        (parts, enabled): jax.jit(
            partial(
                train_step,
                objective=poisoned,
                optimizer=OPTIMIZER,
                spikes=dataclasses.replace(SPIKES, enabled=enabled),
                accumulation=parts,
            )
        )
        for parts, enabled in ((1, True), (4, True), (1, False))
    }
    return lambda *args, parts=1, enabled=True: by_name[parts, enabled](*args)


def uneven(batch):
    """Of the four parts (rows a, a + 4) one has no target left and one has two."""
    targets = np.array(batch.targets)
    targets[[1, 5]] = IGNORED
    targets[[2, 6], 1:] = IGNORED
    return batch._replace(targets=jnp.asarray(targets))


@pytest.mark.parametrize("change", [lambda b: b, uneven], ids=["even", "uneven"])
def test_a_batch_in_four_parts_gives_the_same_step(step, change):
    data = change(batch())
    (whole, one), (parts, four) = (step(start(), data, parts=n) for n in (1, 4))
    assert_values_close(four, one)
    # Adam divides by the gradient's own size: compare what it divides.
    moments = [s.optimizer[1].mu for s in (parts, whole)]
    assert_gradients_close(*moments)
    counts = [int(s.optimizer[1].count) for s in (parts, whole)]
    assert counts == [1, 1]


def test_the_gradient_is_that_of_the_mean_over_the_whole_batch(step):
    state, metrics = step(start(), uneven(batch()), parts=4)
    loss = jax.jit(lambda model, data: poisoned(model, data)[0])
    direct = jax.jit(jax.grad(loss))(start().model, uneven(batch()))
    norm = optax.tree.norm(direct)
    assert float(metrics["gradient_norm"]) == pytest.approx(float(norm), rel=1e-4)
    clipped = jax.tree.map(lambda g: 0.1 * g * min(1.0, 1.0 / norm), direct)
    assert_gradients_close(state.optimizer[1].mu, clipped)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_bad_batch_leaves_parameters_and_moments_bit_identical(step, parts):
    before, _ = step(start(), batch(), parts=parts)
    after, metrics = step(before, batch(1, first=POISON), parts=parts)
    for name in ("model", "optimizer"):
        old = jax.tree.leaves(getattr(before, name))
        new = jax.tree.leaves(getattr(after, name))
        for a, b in zip(old, new, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert np.isnan(metrics["loss"]) and int(metrics["skipped"]) == 1
    assert int(after.step) == 2 and int(after.spikes.accepted) == 1
    again, metrics = step(after, batch(2), parts=parts)
    assert int(metrics["skipped"]) == 0 and int(metrics["updates"]) == 1
    assert int(again.optimizer[1].count) == 2


def test_a_skipped_batch_changes_nothing_of_what_follows(step):
    def train(*batches):
        state = start()
        for data in batches:
            state, _ = step(state, data)
        return jax.tree.map(lambda x: np.asarray(x).tobytes(), state.model)

    with_bad = train(batch(), batch(1, first=POISON), batch(2))
    assert jax.tree.leaves(with_bad) == jax.tree.leaves(train(batch(), batch(2)))


def test_a_spike_is_skipped_by_the_rule_of_sigma(step):
    state = start()
    calm = new_spike_state(SPIKES)._replace(
        losses=jnp.asarray([0.1, 0.2, 0.1, 0.2]), known=jnp.int32(4)
    )
    after, metrics = step(state._replace(spikes=calm), batch())
    assert int(metrics["skipped"]) == 1
    for a, b in zip(
        jax.tree.leaves(state.model), jax.tree.leaves(after.model), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_an_update_that_is_not_finite_is_skipped(step):
    """A second moment that overflowed: loss and gradient are finite, the update not."""
    state = start()
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.optimizer[1].nu)
    moments = (state.optimizer[0], state.optimizer[1]._replace(nu=broken))
    state = state._replace(optimizer=(*moments, *state.optimizer[2:]))
    after, metrics = step(state, batch())
    assert np.isfinite(metrics["loss"]) and int(metrics["skipped"]) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.model))


def test_without_the_rule_the_damage_is_done(step):
    after, metrics = step(start(), batch(first=POISON), enabled=False)
    assert int(metrics["skipped"]) == 0
    assert np.isnan(after.model.w_embedding[...]).all()


def test_training_in_bfloat16_keeps_float32_parameters_and_lowers_the_loss():
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    abstract = jax.eval_shape(
        lambda key: Decoder(model, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    weights = jax.tree.leaves(drawn(MODEL, scale=0.3))
    decoder = jax.tree.unflatten(jax.tree.structure(abstract), weights)
    state = start()._replace(model=decoder, optimizer=OPTIMIZER.init(decoder))
    run = jax.jit(
        partial(
            train_step, objective=NextToken(), optimizer=OPTIMIZER, spikes=SpikeConfig()
        )
    )
    losses = []
    for _ in range(40):
        state, metrics = run(state, batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert all(x.dtype == jnp.float32 for x in floats)
