import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.training.objective import NextToken
from recurjax.types import IGNORED, Batch, Tokens
from tests.training.tiny_experiment import config, drawn

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL = drawn(
    dataclasses.replace(config().model, vocabulary=11, pad_vocabulary_to=4), scale=0.5
)
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)))
TARGETS = jnp.roll(IDS, -1, axis=1).at[:, -1].set(IGNORED)


def evaluate(objective, batch):
    return jax.jit(lambda model, batch: objective(model, batch))(MODEL, batch)


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_z_loss_is_the_mean_squared_log_normalizer(chunks):
    batch = Batch(IDS, TARGETS)
    plain, _ = evaluate(NextToken(), batch)
    objective = NextToken(z_loss=0.01, vocabulary_chunks=chunks)
    loss, metrics = evaluate(objective, batch)
    logits, _ = jax.jit(lambda m, i: m(Tokens(i), m.init_cache(2, 0)))(MODEL, IDS)
    log_normalizer = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    z = 0.01 * np.mean(log_normalizer[:, :-1] ** 2)
    assert float(loss) == pytest.approx(float(plain) + z, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(plain), rel=1e-6)
    assert float(metrics["z_loss"]) == pytest.approx(z, rel=1e-5)


def test_the_loss_is_the_mean_over_the_targets_that_count():
    counts = TARGETS.at[0].set(IGNORED)
    loss, _ = evaluate(NextToken(), Batch(IDS, counts))
    alone, _ = evaluate(NextToken(), Batch(IDS[1:], TARGETS[1:]))
    assert float(loss) == pytest.approx(float(alone), rel=1e-6)


def test_a_batch_without_targets_has_loss_zero():
    nothing = jnp.full_like(TARGETS, IGNORED)
    loss, _ = evaluate(NextToken(z_loss=1.0), Batch(IDS, nothing))
    assert float(loss) == 0


def test_segments_keep_documents_apart():
    segments = jnp.asarray([[0] * 3 + [1] * 5] * 2)
    apart, _ = evaluate(NextToken(), Batch(IDS, TARGETS, segments))
    other = IDS.at[:, :3].set(0)
    late = TARGETS.at[:, :3].set(IGNORED)
    of_late = [
        evaluate(NextToken(), Batch(ids, late, segments))[0] for ids in (IDS, other)
    ]
    assert float(of_late[0]) == float(of_late[1])
    assert float(apart) != float(evaluate(NextToken(), Batch(IDS, TARGETS))[0])
