"""The first loop drafts, the full model verifies: texts are those of plain decoding."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.exits import ExitRule
from recurjax.inference.engine import EngineConfig, RequestSettings
from recurjax.inference.sampling import (
    Draft,
    SamplingConfig,
    row_keys,
    sample,
    sampling_rows,
)
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.position import LearnedPositions
from recurjax.sharding import MeshConfig, reading_mesh
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE, compiled_programs
from tests.inference.engine.models import (
    GREEDY,
    LENGTH,
    SIZES,
    build_engine,
    build_model,
    draw_requests,
    finish,
)
from tests.marks import slow_except
from tests.training.compilation import quick_compilation
from tests.variants.relaxed_recursive_transformer.switches import (
    VOCABULARY,
    build,
    small,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
__all__ = ["quick_compilation"]

TWO = small(
    layers=2,
    rank=2,
    tie_norms=False,
    key_heads=2,
    mlp=MlpConfig(kind="swiglu", width=12),
    attention={"position": LearnedPositions(length=LENGTH)},
)
MODELS = {
    "two loops": TWO,
    "three loops, rings": small(
        loops=3, layers=6, rank=2, windows=(3, None), key_heads=2
    ),
    "loop 1's keys": small(
        loops=3, layers=6, rank=2, loop_cache="first", windows=(4, None)
    ),
}
K = 4


def close_model(config):
    """A model whose deeper loops change little, so that many drafts are right."""

    def shrink(path, leaf):
        name = jax.tree_util.keystr(path)
        return leaf * (0.5 if "w_out" in name or "w_down" in name else 1)

    return jax.tree_util.tree_map_with_path(shrink, build(config))


def speculating(model, **sizes):
    options = {"states_gib": 0.0, "steps": 3, "speculate": K} | sizes
    return build_engine(model, dataclasses.replace(SIZES, **options))


@pytest.fixture(scope="module")
def model():
    return close_model(TWO)


@pytest.fixture(scope="module")
def engine(model):
    return speculating(model)


@pytest.fixture(scope="module")
def wide(model):
    return speculating(model, slots=64, steps=1)


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def logits_of(model, ids):
    return model(Tokens(ids), model.init_cache(len(ids), 0))[0]


def expect_greedy(model, finished):
    """Compares texts with what the full model says of all their tokens at once."""
    ids = np.zeros((len(finished), LENGTH), np.int32)
    for n, request in enumerate(finished):
        read = [*request.prompt, *request.tokens[:-1]]
        ids[n, : len(read)] = read
    likeliest = np.asarray(logits_of(model, ids)).argmax(-1)
    for n, request in enumerate(finished):
        start = len(request.prompt) - 1
        end = start + len(request.tokens)
        assert request.tokens == likeliest[n, start:end].tolist()


def greedy(**settings) -> RequestSettings:
    return RequestSettings(sampling=GREEDY, **settings)


@pytest.mark.parametrize(
    "name",
    [
        "two loops",
        pytest.param("three loops, rings", marks=pytest.mark.sweep),
        pytest.param("loop 1's keys", marks=pytest.mark.slow),
    ],
)
def test_greedy_texts_are_the_full_models(name, request):
    """Of prompts of different lengths; the longest requests fill their slots."""
    whole = close_model(MODELS[name])
    first = name == "two loops"
    engine = request.getfixturevalue("engine") if first else speculating(whole)
    requests = [
        (ids, dataclasses.replace(settings, sampling=GREEDY))
        for ids, settings in draw_requests(VOCABULARY, 12)
    ]
    assert any(len(ids) + s.max_new_tokens - 1 == LENGTH for ids, s in requests)
    before = dataclasses.replace(engine.counts)
    with compiled_programs() as compiled:
        finished = [engine.submit(*request) for request in requests]
        finish(engine, finished)
    assert compiled == []
    expect_greedy(whole, finished)
    for request, (_, settings) in zip(finished, requests, strict=True):
        ended = request.tokens[-1] in settings.stop_tokens
        assert ended or len(request.tokens) == settings.max_new_tokens
    verified = engine.counts.verified_tokens - before.verified_tokens
    accepted = engine.counts.accepted_tokens - before.accepted_tokens
    assert 0 < accepted < verified


def test_a_stop_token_ends_a_text_anywhere_in_a_draft(model, engine):
    whole = engine.submit([3, 5], greedy(max_new_tokens=14))
    finish(engine, [whole])
    stopped = [
        engine.submit([3, 5], greedy(max_new_tokens=14, stop_tokens=(token,)))
        for token in whole.tokens
    ]
    finish(engine, stopped)
    for token, request in zip(whole.tokens, stopped, strict=True):
        end = whole.tokens.index(token) + 1
        assert (request.tokens, request.reason) == (whole.tokens[:end], "eos")
    # The slots' next texts find nothing of what was drafted after the end.
    after = [engine.submit([n], greedy(max_new_tokens=LENGTH)) for n in range(4)]
    finish(engine, after)
    expect_greedy(model, after)


def test_accepted_drafts_take_fewer_steps(engine):
    """And their log-probabilities are the full model's."""
    counts = dataclasses.replace(engine.counts)
    request = engine.submit([7], greedy(max_new_tokens=LENGTH, logprobs=True))
    finish(engine, [request])
    steps = engine.counts.steps - counts.steps
    accepted = engine.counts.accepted_tokens - counts.accepted_tokens
    # A step draws a token of the full model's own after those that it accepts, but
    # where an accepted one is the text's last.
    assert steps + accepted in (LENGTH - 1, LENGTH)
    assert accepted > 0
    ids = np.array([[*request.prompt, *request.tokens[:-1]]], np.int32)
    logs = np.asarray(jax.nn.log_softmax(logits_of(engine._model, ids)))[0]
    expected = logs[np.arange(LENGTH), request.tokens]
    np.testing.assert_allclose(request.logprobs, expected, rtol=1e-5)


def test_a_sampled_request_is_the_same_alone_and_among_others(engine):
    requests = draw_requests(VOCABULARY, 7)
    single = []
    for request in requests:
        single.append(engine.submit(*request))
        finish(engine, single[-1:])
    together = [engine.submit(*request) for request in requests]
    assert finish(engine, together) == [request.tokens for request in single]


SAMPLINGS = {
    "plain": SamplingConfig(),
    "cold, 5 likeliest": SamplingConfig(temperature=0.7, top_k=5),
    "nucleus, penalty": SamplingConfig(top_p=0.8, repetition_penalty=1.5),
}


def deviation(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns (X - n) / sqrt(2 n), X the chi-square statistic of n degrees of freedom.

    Of draws from these probabilities it is normal with variance 1, about.
    """
    assert counts[probabilities == 0].sum() == 0  # what is filtered out is never drawn
    total = counts.sum()
    rare = probabilities * total < 5
    counts, expected = (
        np.append(x[~rare], x[rare].sum()) for x in (counts, probabilities * total)
    )
    counts, expected = counts[expected > 0], expected[expected > 0]
    n = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - n) / (2 * n) ** 0.5


def exact(logits, seen, sampling: SamplingConfig) -> np.ndarray:
    """Returns the distribution that `sample` draws from, in numpy's own words."""
    z = np.asarray(logits, np.float64)
    penalty = sampling.repetition_penalty
    z = np.where(seen, np.where(z > 0, z / penalty, z * penalty), z)
    z = z / sampling.temperature
    order = np.argsort(-z, axis=-1)
    p = np.exp(z - z.max(-1, keepdims=True))
    ranked = np.take_along_axis(p, order, -1)
    ranked[..., sampling.top_k or z.shape[-1] :] = 0
    ranked /= ranked.sum(-1, keepdims=True)
    ranked[np.cumsum(ranked, -1) - ranked >= sampling.top_p] = 0
    np.put_along_axis(p, order, ranked, -1)
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", slow_except(["nucleus, penalty"], SAMPLINGS, slow=()))
def test_verified_drafts_are_distributed_as_plain_draws(name):
    sampling, rows, V = SAMPLINGS[name], 20_000, 9
    draw = np.random.default_rng(1)
    target, cheap = draw.normal(size=(2, V)).astype(np.float32)
    seen = jnp.tile(draw.random(V) < 0.4, (rows, 1))
    settings = jax.tree.map(jnp.asarray, sampling_rows([sampling] * rows))
    target, cheap = (jnp.tile(x, (rows, 1)) for x in (target, cheap))

    # Arguments: so many rows of constants would take XLA ten seconds to fold.
    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(keys, others, target, cheap, seen, settings):
        drafts = Draft(sample(others, cheap, seen, settings), cheap)
        none = Draft(jnp.full(rows, -1), jnp.full_like(cheap, jnp.nan))
        return (
            drafts.ids,
            sample(keys, target, seen, settings, drafts),
            sample(keys, target, seen, settings, none),
        )

    keys = row_keys(0, rows), row_keys(1, rows)
    ids = run(*keys, target, cheap, seen, settings)
    p = exact(target[0], np.asarray(seen[0]), sampling)
    drafted, verified, plain = (np.bincount(x, minlength=V) for x in ids)
    assert abs(deviation(verified, p)) < 4 and abs(deviation(plain, p)) < 4
    # Where the draft may be drawn it is, as often as any rule allows.
    q = exact(cheap[0], np.asarray(seen[0]), sampling)
    share = float(jnp.mean(ids[0] == ids[1]))
    assert share == pytest.approx(np.minimum(p, q).sum(), abs=4 * 0.5 / rows**0.5)
    # The drafts themselves are distributed otherwise.
    assert np.abs(drafted / rows - p).sum() > 0.2


@pytest.mark.parametrize("name", slow_except(["nucleus, penalty"], SAMPLINGS, slow=()))
def test_sampled_texts_are_distributed_as_the_full_models(name, model, wide):
    """All pairs of the second and third token, of 2048 texts."""
    sampling, V, count, engine = SAMPLINGS[name], VOCABULARY, 2048, wide
    prompt = [3, 5]
    settings = RequestSettings(max_new_tokens=3, sampling=sampling, seed=1)
    requests = [
        engine.submit(prompt, dataclasses.replace(settings, stream=n))
        for n in range(count)
    ]
    finish(engine, requests)
    pairs = np.zeros((V, V))
    for request in requests:
        pairs[tuple(request.tokens[1:])] += 1

    ids = np.array([[*prompt, a, b] for a in range(V) for b in range(V)], np.int32)
    logits = np.asarray(logits_of(model, ids))
    seen = np.zeros((3, V * V, V), bool)
    for n in range(3):
        np.put_along_axis(seen[n], ids[:, : 2 + n], True, axis=1)
    first, second, third = (
        exact(logits[:, 1 + n], seen[n], sampling).reshape(V, V, V) for n in range(3)
    )
    # p(a) p(b | a) p(c | a, b), summed over a.
    expected = np.einsum("a,ab,abc->bc", first[0, 0], second[:, 0], third)
    assert abs(deviation(pairs.ravel(), expected.ravel())) < 4
    assert 0 < engine.counts.accepted_tokens < engine.counts.verified_tokens


def test_what_cannot_be_is_refused_in_a_sentence(model):
    sizes = EngineConfig(slots=1, length=8, speculate=2)
    with pytest.raises(UserError, match="this one has a RatConfig: leave speculate"):
        build_engine(build_model("rnn"), sizes)
    with pytest.raises(UserError, match="at least 2 loops, .* this one has 1 loop"):
        build_engine(build(small(loops=1)), sizes)
    with pytest.raises(UserError, match="early exits need sharing 'cycle'"):
        build_engine(build(small(sharing="sequence")), sizes)
    mesh = reading_mesh(MeshConfig(data=1))
    with pytest.raises(UserError, match="speculate runs on one device"):
        build_engine(model, sizes, mesh=mesh)
    rule = ExitRule(kind="confidence", threshold=0.5)
    with pytest.raises(UserError, match="leave one of them out"):
        EngineConfig(speculate=2, exit=rule)
    with pytest.raises(UserError, match=r"\.speculate: must be >= 1"):
        EngineConfig(speculate=0)
