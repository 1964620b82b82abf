"""MAD's compression objective, compared with plain numpy."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from recurjax.data.tasks import Compression, TaskData, TaskDataset
from recurjax.evaluation.accuracy import count_answers
from recurjax.experiment import Experiment
from recurjax.layers.norm import NormConfig
from recurjax.training.objective import Compress, NextToken
from recurjax.types import IGNORED, Batch, Tokens
from tests.training.tiny_experiment import config, drawn

TASK = Compression(length=9, vocabulary=11, train_rows=16, validation_rows=3)
EPS = 1e-6


@pytest.fixture(scope="module")
def model():
    return drawn(
        dataclasses.replace(
            config().model,
            vocabulary=TASK.vocabulary,
            row_decoder=True,
            final_norm=NormConfig(eps=EPS),
        ),
        scale=0.3,
    )


@pytest.fixture(scope="module")
def batch():
    rows = TaskDataset(config=TaskData(task=TASK)).loader("train", length=12, batch=4)
    result = next(iter(rows))
    return Batch(result["ids"], result["targets"])


def by_hand(model, batch) -> np.ndarray:
    """Returns the logits of every place: numpy, from the stack's last states on."""
    tokens, cache = Tokens(batch.ids), model.init_cache(len(batch.ids), 0)
    states, _ = jax.jit(lambda m: m.stack(m.embed(batch.ids), cache, tokens))(model)
    z = np.asarray(states, np.float64)[:, TASK.length - 1]
    part, D = model.row_decoder, z.shape[1]

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * np.asarray(scale)

    def gelu(x):
        return np.vectorize(lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)

    rows = []
    for t in range(batch.ids.shape[1]):
        rates = [10_000 ** (-i / (D // 2 - 1)) for i in range(D // 2)]
        place = [math.sin(t * r) for r in rates] + [math.cos(t * r) for r in rates]
        y = norm(z + np.array(place), part.first_norm.scale[...])
        y = gelu(y @ np.asarray(part.w_first[...]) + np.asarray(part.b_first[...]))
        y = norm(y, part.second_norm.scale[...])
        y = gelu(y @ np.asarray(part.w_second[...]) + np.asarray(part.b_second[...]))
        y = norm(y, model.final_norm.scale[...])
        rows.append(y @ np.asarray(model.w_embedding[...]).T)
    return np.stack(rows, axis=1)


def test_loss_and_accuracy_are_those_of_plain_numpy(model, batch):
    logits, asked = by_hand(model, batch), np.asarray(batch.targets) != IGNORED
    assert asked.sum() == 4 * TASK.length  # padding has no targets
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = np.where(asked, batch.targets, 0)
    nats = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    loss, metrics = jax.jit(lambda m, b: Compress()(m, b))(model, batch)
    np.testing.assert_allclose(loss, nats[asked].mean(), rtol=1e-5)
    assert metrics["loss"] == loss
    counts = count_answers(model, batch, objective=Compress())
    right = (logits.argmax(-1) == batch.targets) & asked
    np.testing.assert_array_equal(counts.right, right.sum(1))


def test_no_token_but_by_way_of_the_last_state_is_told(model, batch):
    """Another last state, the same tokens' states before it: every place changes."""
    states = jax.jit(Compress().states)
    ids = np.array(batch.ids)
    ids[:, TASK.length - 1] = 0
    before, after = states(model, batch), states(model, batch._replace(ids=ids))
    assert (np.abs(np.asarray(before - after)).max(-1) > 1e-6).all()
    # Tokens after the row change nothing.
    ids = np.array(batch.ids)
    ids[:, TASK.length :] = 5
    np.testing.assert_array_equal(before, states(model, batch._replace(ids=ids)))


def test_a_model_without_the_decoder_is_refused():
    tiny = config()
    with pytest.raises(ValueError, match="set --model.row-decoder True"):
        dataclasses.replace(tiny, objective=Compress())
    model = dataclasses.replace(tiny.model, row_decoder=True)
    fit: Experiment = dataclasses.replace(tiny, model=model, objective=Compress())
    length, width = tiny.training.length, tiny.model.stack.width
    more = fit.flops_per_token - tiny.flops_per_token
    assert more == 6 * 2 * width**2 and Compress().passes == NextToken().passes
    assert fit.objective.beside_flops(model, length) == more
