import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.evaluation.perplexity import (
    Score,
    bits_per_byte,
    joined,
    score,
    text_sums,
)
from recurjax.training.objective import NextToken
from recurjax.types import IGNORED, Batch, Tokens
from recurjax.variants.latent_recurrent_transformer import MemoryConfig
from recurjax.variants.latent_recurrent_transformer.objectives import (
    Interleaved,
    interleaved_passes,
)
from recurjax.variants.latent_recurrent_transformer.recurrence import strided_partition
from tests.golden.cases import golden_cases, load
from tests.training.tiny_experiment import config, drawn
from tests.variants.latent_recurrent_transformer.switches import build, small

MODEL = dataclasses.replace(config().model, vocabulary=5)
BYTES = np.array([1, 2, 0, 3, 1])  # Token 2 is special: it has no text.
IDS = np.array([[0, 3, 1, 4], [2, 1, 1, 0], [4, 2, 0, 3]])
TARGETS = np.array([[3, 1, 4, 2], [1, 1, 0, IGNORED], [2, 0, 3, 1]])


def test_a_mixture_weighs_its_parts_by_their_tokens_and_bytes():
    one = Score(loss=1.0, perplexity=0.0, bits_per_byte=3.0, tokens=30, bytes=10)
    two = Score(loss=5.0, perplexity=0.0, bits_per_byte=1.0, tokens=10, bytes=90)
    whole = joined({"one": one, "two": two})
    assert (whole.loss, whole.perplexity) == (2.0, pytest.approx(math.exp(2.0)))
    assert whole.bits_per_byte == pytest.approx((3.0 * 10 + 1.0 * 90) / 100)
    assert (whole.tokens, whole.bytes) == (40, 100)
    # Text without bytes has a loss and no bits.
    special = one._replace(bits_per_byte=math.nan, bytes=0)
    assert joined({"one": special, "two": two}).bits_per_byte == 1.0
    assert math.isnan(joined({"one": special}).bits_per_byte)


@pytest.fixture(scope="module")
def model(quick_compilation):
    return drawn(MODEL, scale=0.5)


@pytest.fixture(scope="module")
def surprise(model):
    """-ln p(target) of each position, by a softmax of the plain logits."""
    forward = jax.jit(lambda m, ids: m(Tokens(ids), m.init_cache(len(ids), 0))[0])
    logits = np.asarray(forward(model, jnp.asarray(IDS)), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, TARGETS.clip(0)[..., None], -1)[..., 0]
    return -np.log(chosen)


def batches(targets=TARGETS, rows=3):
    for start in range(0, len(IDS), rows):
        part = slice(start, start + rows)
        yield Batch(jnp.asarray(IDS[part]), jnp.asarray(targets[part]))


def test_loss_is_nats_a_token_and_perplexity_its_exponential(model, surprise):
    got = score(model, batches(), token_bytes=BYTES, objective=NextToken())
    want = sum(
        surprise[b, t] for b in range(3) for t in range(4) if TARGETS[b, t] != IGNORED
    )
    assert got.tokens == 11
    assert got.loss == pytest.approx(want / 11, rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(want / 11), rel=1e-5)


def test_bits_per_byte_are_those_of_the_text_without_special_tokens(model, surprise):
    got = score(model, batches(), token_bytes=BYTES, objective=NextToken())
    # Targets, row by row: 3 1 4 (2), 1 1 0, (2) 0 3 1.
    assert got.bytes == (3 + 2 + 1) + (2 + 2 + 1) + (1 + 3 + 2)
    nats = surprise[0, :3].sum() + surprise[1, :3].sum() + surprise[2, 1:].sum()
    assert got.bits_per_byte == pytest.approx(nats / math.log(2) / 17, rel=1e-5)


@pytest.mark.parametrize(
    "path", golden_cases("latent_recurrent_transformer/bpb_case*.npz")
)
def test_bits_per_byte_are_nanochats(path):
    case = load(path)
    targets = np.where(case["y"] < 0, IGNORED, case["y"]).reshape(case["loss"].shape)
    sums = text_sums(*map(jnp.asarray, (case["loss"], targets, case["token_bytes"])))
    got = bits_per_byte(*map(float, sums))
    assert got == pytest.approx(float(case["bpb"]), rel=1e-6)


@pytest.mark.parametrize("rows, chunks", [(1, 1), (3, 3)])
def test_neither_batches_nor_chunks_change_the_score(model, rows, chunks):
    want = score(model, batches(), token_bytes=BYTES, objective=NextToken())
    calls = []
    got = score(
        model,
        batches(rows=rows),
        token_bytes=BYTES,
        objective=NextToken(vocabulary_chunks=chunks),
        between=lambda: calls.append(1),
    )
    assert got.accuracy is want.accuracy is None  # of tasks only
    assert got.passes == want.passes == ()
    np.testing.assert_allclose(got[:5], want[:5], rtol=1e-5)
    assert len(calls) == 3 // rows


def test_every_pass_of_a_latent_memory_has_its_bits_per_byte(quick_compilation):
    """By logits of the passes themselves; the main figure counts each token's last
    pass."""
    model = build(small(MemoryConfig(sources=(2,))))
    batch = next(batches())
    objective = Interleaved(subsets=2)
    want, nats_of_last = [], 0.0

    @jax.jit
    def logits_of_passes(model, batch):
        partition = strided_partition(4, 2)
        passes = interleaved_passes(model, batch, partition)
        return [jax.nn.log_softmax(model.logits(x)) for _, x in passes]

    for number, logits in enumerate(logits_of_passes(model, batch)):
        targets = TARGETS if number == 0 else TARGETS[:, number - 1 :: 2]
        chosen = np.take_along_axis(
            np.asarray(logits, np.float64), targets.clip(0)[..., None], -1
        )[..., 0]
        sizes = np.where(targets == IGNORED, 0, BYTES[targets.clip(0)])
        nats = -chosen[sizes > 0].sum()
        want.append(nats / math.log(2) / sizes.sum())
        nats_of_last += nats if number else 0.0
    got = score(model, [batch], token_bytes=BYTES, objective=objective)
    np.testing.assert_allclose(got.passes, want, rtol=1e-5)
    assert got.bits_per_byte == pytest.approx(nats_of_last / math.log(2) / 17, rel=1e-5)
    assert len({round(bits, 4) for bits in got.passes}) == 3
    messages = [got.metrics()[f"bits_per_byte_pass_{number}"] for number in range(3)]
    assert messages == list(got.passes)


def test_a_text_of_special_tokens_only_has_no_bits_per_byte(model):
    only = np.where(TARGETS == 2, TARGETS, IGNORED)
    got = score(model, batches(only), token_bytes=BYTES, objective=NextToken())
    assert (got.tokens, got.bytes) == (2, 0)
    assert math.isnan(got.bits_per_byte) and got.loss > 0


def test_nothing_to_predict_is_an_error(model):
    nothing = np.full_like(TARGETS, IGNORED)
    with pytest.raises(ValueError, match="at least one token to predict"):
        score(model, batches(nothing), token_bytes=BYTES, objective=NextToken())
