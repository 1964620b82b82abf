"""Right answers, counted as a loop over the places counts them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recurjax.data.tasks import RowLabels
from recurjax.evaluation import accuracy as room
from recurjax.evaluation.accuracy import accuracy, count_answers
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.model import Decoder, ModelConfig
from recurjax.types import IGNORED, Batch, Tokens
from recurjax.variants.transformer import TransformerConfig

V, B, T = 11, 6, 8


@pytest.fixture(scope="module")
def model():
    stack = TransformerConfig(
        layers=1,
        width=16,
        attention=AttentionConfig(heads=2, key_heads=2, head_width=8),
        mlp=MlpConfig(kind="gelu", width=16),
    )
    config = ModelConfig(vocabulary=V, pad_vocabulary_to=4, stack=stack)
    return Decoder(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def batch(model):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(V, size=(B, T)), jnp.int32)
    best = likeliest_by_hand(model, ids)
    # About half of the answers right, one row all right, one without targets.
    targets = np.where(rng.random((B, T)) < 0.5, best, rng.integers(V, size=(B, T)))
    targets[rng.random((B, T)) < 0.3] = IGNORED
    targets[:, 0] = IGNORED
    targets[4, 1:] = best[4, 1:]
    targets[5] = IGNORED
    return Batch(ids, jnp.asarray(targets, jnp.int32))


def likeliest_by_hand(model, ids) -> np.ndarray:
    logits, _ = jax.jit(lambda m: m(Tokens(ids), m.init_cache(B, 0)))(model)
    return np.asarray(logits).argmax(-1)


LABELS = [[RowLabels({"pairs": 2 + row % 2}, 0.25 + row) for row in range(B)]]


def test_shares_are_those_of_a_loop(model, batch):
    got = accuracy([count_answers(model, batch)], LABELS)
    best, targets = likeliest_by_hand(model, batch.ids), np.asarray(batch.targets)
    right = [
        (row, t, int(targets[row, t]), targets[row, t] == best[row, t])
        for row in range(B)
        for t in range(T)
        if targets[row, t] != IGNORED
    ]

    def share(result) -> float:
        result = list(result)
        return sum(result) / len(result)

    assert got.token == share(r for *_, r in right)
    classes = {c for _, _, c, _ in right}
    want = np.mean([share(r for *_, k, r in right if k == c) for c in classes])
    np.testing.assert_allclose(got.mean_of_classes, want, rtol=1e-12)
    whole = [all(r for n, *_, r in right if n == row) for row in range(B - 1)]
    assert got.sequence == share(whole) and any(whole) and not all(whole)
    assert got.rows == B - 1  # the last asks nothing
    for value in (2, 3):
        mine = share(r for row, *_, r in right if 2 + row % 2 == value)
        assert got.slices[f"pairs={value}"] == mine
        asked = sum(2 + row % 2 == value for row, *_ in right)
        assert got.answers[f"pairs={value}"] == asked
        # Rows 0, 2, 4 and 1, 3: the last asks nothing.
        floor = sum(0.25 + row for row in range(B - 1) if 2 + row % 2 == value)
        assert got.slice_floors[f"pairs={value}"] == floor / asked
    assert got.floor == sum(0.25 + row for row in range(B - 1)) / len(right)
    assert got.positions[0] is None
    assert got.positions[3] is not None
    np.testing.assert_allclose(
        got.positions[3], share(r for _, t, _, r in right if t == 3)
    )


def test_batches_add_up(model, batch):
    parts = [Batch(batch.ids[r], batch.targets[r]) for r in (slice(0, 2), slice(2, 6))]
    counts = [count_answers(model, part) for part in parts]
    whole = accuracy([count_answers(model, batch)], LABELS)
    added = accuracy(counts, [LABELS[0][:2], LABELS[0][2:]])
    assert added.metrics() == whole.metrics() and added.rows == whole.rows
    assert added.positions == whole.positions


def test_slices_stand_in_the_order_of_their_numbers(model, batch):
    labels = [[RowLabels({"pairs": (512, 64, 128)[row % 3]}, 0.0) for row in range(B)]]
    got = accuracy([count_answers(model, batch)], labels)
    assert list(got.slices) == ["pairs=64", "pairs=128", "pairs=512"]


def test_few_logits_at_a_time_find_the_same_tokens(model, batch, monkeypatch):
    x = jax.jit(lambda m: m.hidden(Tokens(batch.ids), m.init_cache(B, 0))[0])(model)
    whole = room.likeliest(model, x)
    monkeypatch.setattr(room, "LOGITS_AT_ONCE", 3 * B * V)
    np.testing.assert_array_equal(room.likeliest(model, x), whole)


def test_nothing_asked_is_an_error(model, batch):
    empty = Batch(batch.ids, jnp.full_like(batch.targets, IGNORED))
    with pytest.raises(ValueError, match="must have at least one target"):
        accuracy([count_answers(model, empty)], LABELS)
