"""Scores of pairs: as one dense row each, shared or not, batched in any way, cut over
any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.evaluation.scorer import Pair, Scorer, bucket, rolling
from recurjax.sharding import MeshConfig, make_mesh, shardings
from recurjax.types import Tokens
from tests.marks import slow_except
from tests.tolerances import TOLERANCES
from tests.variants.latent_recurrent_transformer import switches as latent
from tests.variants.rat import switches as rat
from tests.variants.recurformer import switches as recurformer
from tests.variants.recurrent_transformer import switches as recurrent
from tests.variants.transformer import switches as transformer

ROOMS = {
    "transformer": transformer,
    "recurrent_transformer": recurrent,
    "rat": rat,
    "latent_recurrent_transformer": latent,
    "recurformer": recurformer,
}
T = 24


QUICK = ("rat", "latent_recurrent_transformer", "recurformer")


@pytest.fixture(scope="module", params=slow_except(QUICK, ROOMS, slow=()))
def model(request):
    return transformer.build(next(iter(ROOMS[request.param].SWITCHES.values())))


def pairs_of(model, seed=0) -> list[Pair]:
    """Three contexts with several continuations each, and three alone."""
    rng = np.random.default_rng(seed)

    def tokens(count):
        return tuple(rng.integers(model.config.vocabulary, size=count).tolist())

    pairs = []
    for length in (3, 11, 6):
        context = tokens(length)
        pairs += [Pair(context, tokens(count)) for count in (1, 4, 2)]
    pairs += [Pair(tokens(length), tokens(3)) for length in (1, 9, 17)]
    rng.shuffle(pairs)
    return [Pair(*map(tuple, pair)) for pair in pairs]


@jax.jit
def dense(model, ids):
    logits, _ = model(Tokens(ids), model.init_cache(ids.shape[0], 0))
    return jax.nn.log_softmax(logits, axis=-1)


def by_hand(model, pairs):
    """Each pair as a row of its own, all logits of it."""
    ids = np.zeros((len(pairs), T), np.int32)
    for row, (context, continuation) in zip(ids, pairs, strict=True):
        row[: len(context) + len(continuation)] = [*context, *continuation]
    log_p = np.asarray(dense(model, jnp.asarray(ids)))
    scores = []
    for row, (context, continuation) in enumerate(pairs):
        at = len(context) - 1 + np.arange(len(continuation))
        nats = -log_p[row, at, list(continuation)]
        greedy = (log_p[row, at].argmax(-1) == continuation).all()
        scores.append((-nats.sum(), bool(greedy), nats))
    return scores


def assert_scores(got, want):
    tolerance = 5 * TOLERANCES["float32"].value
    for mine, (log_p, greedy, nats) in zip(got, want, strict=True):
        np.testing.assert_allclose(mine.nats, nats, rtol=0, atol=tolerance)
        np.testing.assert_allclose(mine.log_p, log_p, rtol=0, atol=4 * tolerance)
        assert mine.greedy == greedy


@pytest.mark.parametrize("share", [True, False], ids=["shared", "alone"])
def test_scores_are_those_of_one_dense_row_a_pair(model, share):
    pairs = pairs_of(model)
    done = []
    score = Scorer(model=model, rows=4, share=share, report=done.append)
    assert_scores(score(pairs), by_hand(model, pairs))
    assert sum(done) == len(pairs)


def test_the_likeliest_continuation_is_greedy(model):
    pairs = pairs_of(model)
    log_p = dense(model, jnp.asarray([pairs[0].context], jnp.int32))
    best = int(np.asarray(log_p)[0, -1].argmax())
    worst = int(np.asarray(log_p)[0, -1].argmin())
    pairs = [Pair(pairs[0].context, (token,)) for token in (best, worst)]
    assert [s.greedy for s in Scorer(model=model, rows=4)(pairs)] == [True, False]


@pytest.mark.parametrize(
    "model",
    slow_except((), ROOMS, slow=["rat", "recurrent_transformer"]),
    indirect=True,
)
def test_devices_give_the_numbers_of_one(model):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    pairs = pairs_of(model)
    spread = jax.device_put(model, shardings(model, mesh))
    got = Scorer(model=spread, mesh=mesh, rows=3)(pairs)
    assert_scores(got, by_hand(model, pairs))


def test_the_order_and_the_batch_do_not_matter():
    model = transformer.build(next(iter(transformer.SWITCHES.values())))
    pairs = pairs_of(model)
    want = Scorer(model=model, rows=4)(pairs)
    backwards = Scorer(model=model, rows=4)(pairs[::-1])[::-1]
    assert_scores(backwards, want)
    assert_scores(Scorer(model=model, rows=12)(pairs), want)
    assert Scorer(model=model)([]) == []


def test_a_text_is_cut_so_that_each_token_is_scored_once():
    text = list(range(100, 111))
    pairs = rolling(text, first=7, longest=4)
    assert [token for pair in pairs for token in pair.continuation] == text
    assert pairs[0] == Pair((7,), (100, 101, 102, 103))
    assert pairs[1] == Pair((103,), (104, 105, 106, 107))
    # The last window is as long as the model allows.
    assert pairs[2] == Pair((106, 107), (108, 109, 110))
    for context, continuation in pairs:
        assert len(context) + len(continuation) - 1 <= 4
    assert rolling([1, 2], first=7, longest=9) == [Pair((7,), (1, 2))]
    assert rolling([], first=7, longest=9) == []


def test_what_cannot_be_scored_is_refused():
    model = transformer.build(next(iter(transformer.SWITCHES.values())))
    for pair in (Pair((), (1,)), Pair((1,), ())):
        with pytest.raises(UserError, match="at least one token each"):
            Scorer(model=model)([pair])
    with pytest.raises(UserError, match="rows must be at least 1"):
        Scorer(model=model, rows=0)


@pytest.mark.parametrize(
    "width, most, rounded",
    [
        (1, None, 16),
        (16, None, 16),
        (17, None, 24),
        (24, None, 24),
        (25, None, 32),
        (33, None, 48),
        (48, 48, 48),
        (49, 63, 49),  # 64 would exceed what the model reads.
        (49, 64, 64),
    ],
)
def test_widths_are_rounded_so_that_few_programs_compile(width, most, rounded):
    assert bucket(width, most, smallest=16) == rounded
