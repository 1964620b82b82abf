import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.evaluation.by_position import loss_by_position
from recurjax.types import IGNORED, Batch, Tokens
from tests.training.tiny_experiment import config, drawn


def test_each_stretch_has_the_mean_of_its_own_tokens():
    model = drawn(config().model)
    draw = np.random.default_rng(0)
    batches = []
    for _ in range(2):
        ids, targets = draw.integers(257, size=(2, 3, 7), dtype=np.int32)
        targets[1, 4:] = IGNORED
        batches.append(Batch(jnp.asarray(ids), jnp.asarray(targets)))
    got = loss_by_position(model, batches, stretch=3)
    assert [(part.start, part.stop) for part in got] == [(0, 3), (3, 6), (6, 7)]
    assert [part.tokens for part in got] == [18, 14, 4]
    ids, targets = (
        np.concatenate([getattr(batch, name) for batch in batches])
        for name in ("ids", "targets")
    )
    logits, _ = model(Tokens(jnp.asarray(ids)), model.init_cache(6, 0))
    logs = np.asarray(jax.nn.log_softmax(logits))
    chosen = np.take_along_axis(logs, np.maximum(targets, 0)[..., None], 2)[..., 0]
    nats = np.ma.array(-chosen, mask=targets == IGNORED)
    want = [nats[:, part.start : part.stop].mean() for part in got]
    np.testing.assert_allclose([part.loss for part in got], want, rtol=1e-5)


def test_nothing_to_predict_is_an_error():
    model = drawn(config().model)
    with pytest.raises(ValueError, match="at least one token to predict"):
        loss_by_position(model, [], stretch=3)
    with pytest.raises(ValueError, match="stretch must be at least 1"):
        loss_by_position(model, [], stretch=0)
