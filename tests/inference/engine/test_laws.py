"""The laws of the engine, for every variant: who else is there changes no token."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from recurjax.inference.engine import Engine, RequestSettings
from recurjax.types import Tokens
from tests.compiling import QUICK_COMPILE, compiled_programs
from tests.inference.engine.models import (
    FAST,
    GREEDY,
    INTERLEAVINGS,
    LENGTH,
    SIZES,
    SLOTS,
    VARIANTS,
    alone,
    build_engine,
    build_model,
    draw_requests,
    finish,
    interleave,
    use_prefix_cache,
)
from tests.inference.oracle import tokens_of
from tests.marks import slow_except

QUICK = ("rnn", "transformer")
"""Variants that a test with two programs of its own runs for, unless slow."""


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    """A name, its model, an engine, and requests with the tokens each has alone."""
    name = request.param
    model = build_model(name)
    engine = build_engine(model)
    use_prefix_cache(engine, 0)
    requests = draw_requests(model.config.vocabulary, 7)
    expected = [alone(engine, *wanted) for wanted in requests]
    return name, model, engine, requests, expected


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def forward(model, ids):
    return model(Tokens(ids[None]), model.init_cache(1, 0))[0][0]


def test_greedy_tokens_are_those_of_the_plain_forward(variant):
    _, model, engine, _, _ = variant
    use_prefix_cache(engine, 0)
    draw = np.random.default_rng(3)
    for length in (1, 8, 9, LENGTH):
        prompt = draw.integers(model.config.vocabulary, size=length)
        settings = RequestSettings(max_new_tokens=LENGTH - length + 1, sampling=GREEDY)
        result = alone(engine, prompt, settings)
        assert len(result) == LENGTH - length + 1
        whole = np.array([*prompt, *result[:-1]], np.int32)
        likeliest = np.asarray(forward(model, whole)).argmax(-1)[length - 1 :]
        np.testing.assert_array_equal(result, likeliest)


def test_neighbours_and_slots_change_no_token_and_nothing_is_compiled(variant):
    _, _, engine, requests, expected = variant
    use_prefix_cache(engine, 0)
    assert any(len(set(tokens)) > 2 for tokens in expected)
    with compiled_programs() as compiled:
        for order in (range(7), range(6, -1, -1), (3, 0, 5, 1, 6, 2, 4)):
            together = [engine.submit(*requests[n]) for n in order]
            assert finish(engine, together) == [expected[n] for n in order]
    assert compiled == []
    assert engine.active == engine.waiting == 0


@pytest.mark.parametrize(
    "variant",
    slow_except(QUICK, VARIANTS, slow=["latent_recurrent_transformer"]),
    indirect=True,
)
def test_prompts_read_together_have_the_tokens_that_they_have_alone(variant):
    _, model, _, requests, expected = variant
    # One call may read as many tokens as all slots hold: two prompts are worth it.
    sizes = dataclasses.replace(SIZES, states_gib=0.0, prefill_tokens=SLOTS * LENGTH)
    engine = Engine(model, sizes)
    for order in (range(7), (3, 0, 5, 1, 6, 2, 4)):
        together = [engine.submit(*requests[n]) for n in order]
        read, tokens = engine._together()
        width = engine._programs.width_of(max(len(each.prompt) for each in read))
        assert tokens == SLOTS * width
        assert finish(engine, together) == [expected[n] for n in order]
    # Into fresh slots, and into free ones while others continue.
    fresh = {key[2] for key in engine._programs._compiled if key[0] == "together"}
    assert fresh == {True, False}


def test_a_kept_state_changes_no_token_and_only_what_is_new_is_read(variant):
    _, model, engine, _, _ = variant
    draw = np.random.default_rng(5)
    first = draw.integers(model.config.vocabulary, size=5).tolist()
    settings = RequestSettings(max_new_tokens=4, seed=9, keep=(3,))
    use_prefix_cache(engine)
    answer = alone(engine, first, settings)
    turn = [*first, *answer, *draw.integers(model.config.vocabulary, size=2).tolist()]
    other = [*first[:3], *draw.integers(model.config.vocabulary, size=6).tolist()]
    for prompt, saved in ((turn, 8), (other, 3), (turn, 8)):
        read = engine.counts.read_tokens
        request = engine.submit(prompt, settings)
        (kept,) = finish(engine, [request])
        assert request.reused == saved
        assert engine.counts.read_tokens - read == len(prompt) - saved
        pool = engine.prefix_cache
        use_prefix_cache(engine, 0)
        assert alone(engine, prompt, settings) == kept
        engine.prefix_cache = pool
    # The full prompt, with the state that its first new token is drawn from.
    again = dataclasses.replace(settings, keep=(len(turn),))
    assert alone(engine, turn, again) == kept
    request = engine.submit(turn, again)
    assert finish(engine, [request]) == [kept] and request.reused == len(turn)


def test_submitting_and_cancelling_at_random_changes_no_token(variant):
    _, _, engine, requests, expected = variant
    for seed in range(2):
        interleave(engine, requests, expected, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    slow_except(("rat", "recurrent_transformer"), VARIANTS, slow=()),
    indirect=True,
)
@pytest.mark.parametrize("seeds", INTERLEAVINGS)
def test_random_interleavings_change_no_token(variant, seeds):
    _, _, engine, requests, expected = variant
    for seed in seeds:
        interleave(engine, requests, expected, seed)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in VARIANTS
    ],
    indirect=True,
)
def test_the_tokens_are_those_of_one_forward_pass_each(variant):
    _, model, _, requests, expected = variant
    for (prompt, settings), tokens in zip(requests, expected, strict=True):
        assert tokens == tokens_of(model, prompt, settings, LENGTH)
