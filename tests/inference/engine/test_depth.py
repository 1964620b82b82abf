"""Slots at mixed loops: each request's tokens are those it has by itself."""

import dataclasses
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import target
from recurjax.errors import UserError
from recurjax.exits import EarlyExit, ExitHead, ExitRule, confidence
from recurjax.inference.engine import EngineConfig, RequestSettings, depth_wise
from recurjax.inference.engine.memory import (
    copied_bytes,
    slots_that_fit,
    tree_bytes,
)
from recurjax.inference.engine.slots import Slots
from recurjax.inference.engine.strategy import choose_strategy
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LearnedPositions
from recurjax.types import LoopPositions, Tokens
from tests.compiling import QUICK_COMPILE, compiled_programs
from tests.inference.engine.models import (
    GREEDY,
    INTERLEAVINGS,
    LENGTH,
    SIZES,
    alone,
    build_engine,
    build_model,
    draw_requests,
    finish,
    interleave,
)
from tests.inference.oracle import early_text, tokens_of
from tests.marks import slow_except
from tests.training.compilation import quick_compilation
from tests.variants.relaxed_recursive_transformer.switches import (
    NEOX,
    VOCABULARY,
    build,
    small,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
__all__ = ["quick_compilation"]

OWN = small(
    loops=3,
    layers=6,
    rank=2,
    tie_norms=False,
    windows=(3, None),
    key_heads=2,
    attention={"qk_norm": NormConfig()},
)
FIRST = small(loops=3, layers=6, rank=2, loop_cache="first", windows=(4, None))
BIASED = small(loops=3, layers=3, rank=3, tie_norms=False, windows=(4,), **NEOX)
QUICK = small(
    loops=3,
    layers=3,
    rank=2,
    tie_norms=False,
    windows=(3,),
    key_heads=2,
    mlp=MlpConfig(kind="swiglu", width=12),
    attention={"position": LearnedPositions(length=LENGTH)},
)
HEAD = ExitHead(
    *(
        np.random.default_rng(n).normal(size=shape).astype(np.float32) * 0.3
        for n, shape in enumerate(((2, 8), (2,)))
    )
)
SURE, NEVER = 0.02, 1.0
WAYS = {
    "propagate": (OWN, "confidence", SURE),
    "skip": (BIASED, "head", 0.5),
    "share": (FIRST, "cosine", 0.85),
    "propagate quick": (QUICK, "confidence", SURE),
}
SLOW = ("propagate", "skip", "share")


@pytest.mark.parametrize("kind", ["windows", "ran"])
def test_a_slots_own_part_says_what_all_parts_under_a_mask_do(kind):
    """A TPU reads the keys of all loops, other devices a slot's own."""
    stack = build(OWN if kind == "windows" else BIASED).stack
    B, loops = 4, 3
    draw = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype),
        stack.init_ticks(B, LENGTH, jnp.float32),
    )
    lanes = LoopPositions(
        loop=jnp.asarray([[0], [2], [1], [2]]),
        position=jnp.asarray([[1], [5], [0], [7]]),
        live=jnp.ones((B, 1), bool),
    )
    ran = None
    if kind == "ran":
        ran = jnp.asarray(draw.integers(1, loops + 1, size=(B, LENGTH)))
    x = jnp.asarray(draw.normal(size=(B, 1, stack.config.width)), jnp.float32)
    results = []
    for platform in ("cpu", "tpu"):
        with target.as_if(target.Target(platform=platform, kind="")):
            tick = jax.jit(
                lambda x, cache: stack.tick(
                    x, lanes, cache, stack.tick_weights(), ran=ran
                ),
                compiler_options=QUICK_COMPILE,
            )
            results.append(tick(x, cache))
    chex.assert_trees_all_close(*results, rtol=1e-6, atol=1e-6)


def test_a_slots_next_text_finds_no_exits_of_the_text_before():
    """All loops have read a prompt, whatever tokens stood at its positions before."""
    model = build(BIASED)
    way = depth_wise.DepthWise(kind="confidence", missing="skip")
    cache, _ = way.empty(model, 2, 4)
    ran = jnp.asarray([[1, 2, 1, 2], [2, 1, 2, 1]])
    depth = depth_wise.Depth(
        loop=jnp.asarray([2, 1]),
        position=jnp.asarray([4, 3]),
        x=jnp.zeros((2, 1, 8)),
        ran=ran,
    )
    slots = Slots(*(None,) * len(Slots._fields))  # pyright: ignore
    slots = slots._replace(depth=depth, cache=cache)
    sizes = {"length": jnp.asarray(2), "limit": jnp.asarray(4)}
    read = model.init_cache(1, 4)
    _, after = way.put(model, slots, jnp.asarray(1), read, **sizes)
    np.testing.assert_array_equal(after.ran, [[1, 2, 1, 2], [3, 3, 3, 3]])
    np.testing.assert_array_equal(after.loop, [2, 0])
    np.testing.assert_array_equal(after.position, [4, 2])


def depth_engine(name: str, missing: str | None = None, **sizes):
    config, kind, threshold = WAYS[name]
    rule = ExitRule(kind=kind, threshold=threshold)
    missing = missing or name.split()[0]
    whole = dataclasses.replace(
        SIZES, states_gib=0.0, steps=6, exit=rule, missing=missing, **sizes
    )
    head = HEAD if kind == "head" else None
    return build_engine(build(config), whole, exit_head=head)


def by_themselves(name: str, requests):
    """What the reference makes of each request, one row and one loop at a time."""
    config, kind, usual = WAYS[name]
    exits = EarlyExit(
        rule=ExitRule(kind=kind, threshold=usual),
        missing=name.split()[0],
        head=HEAD if kind == "head" else None,
    )
    model = build(config)
    return [early_text(model, *request, LENGTH, exits) for request in requests]


@pytest.fixture(scope="module")
def quick():
    return depth_engine("propagate quick")


@pytest.fixture(scope="module")
def verifier():
    return depth_engine("propagate quick", missing="verify")


@partial(jax.jit, compiler_options=QUICK_COMPILE)
def whole_rows(model, ids, prompts, thresholds):
    """The likeliest next token at each place, and the loops that each token ran."""

    def leave(loop, before, after):
        sure = confidence(model.logits(model.final_norm(after))) > thresholds[:, None]
        return sure & (jnp.arange(ids.shape[1]) >= prompts[:, None])

    x, ran = model.stack.leaving(model.embed(ids), Tokens(ids), leave)
    return jnp.argmax(model.logits(model.final_norm(x)), axis=-1), ran


def greedy_requests(count: int, thresholds: tuple[float | None, ...]):
    return [
        (
            ids,
            dataclasses.replace(
                settings,
                sampling=GREEDY,
                threshold=thresholds[n % len(thresholds)],
            ),
        )
        for n, (ids, settings) in enumerate(draw_requests(VOCABULARY, count))
    ]


def expect(requests, finished, *, early: bool):
    """Compares greedy texts with full rows of the model that made them.

    Args:
      early: their tokens left early; else they are the full model's.
    """
    count = len(finished)
    ids, prompts = np.zeros((count, LENGTH), np.int32), np.zeros(count, np.int32)
    thresholds = np.full(count, NEVER, np.float32)
    for n, (request, (_, settings)) in enumerate(zip(finished, requests, strict=True)):
        read = [*request.prompt, *request.tokens[:-1]]
        ids[n, : len(read)], prompts[n] = read, len(request.prompt)
        if early:
            usual = SURE if settings.threshold is None else settings.threshold
            thresholds[n] = usual
    likeliest, ran = whole_rows(build(QUICK), ids, prompts, thresholds)
    for n, request in enumerate(finished):
        start, end = prompts[n], prompts[n] + len(request.tokens) - 1
        assert request.tokens == likeliest[n, start - 1 : end].tolist()
        assert len(request.loops) == len(request.tokens)
        if early:
            assert request.loops == [3, *ran[n, start:end].tolist()]


def test_tokens_and_loops_are_those_of_whole_rows_in_any_company(quick):
    # By one rule, always after the first loop, and never: as `generate`.
    requests = greedy_requests(9, (None, 0.0, NEVER))
    orders, results = (range(9), range(8, -1, -1)), []
    with compiled_programs() as compiled:
        for order in orders:
            results.append([quick.submit(*requests[n]) for n in order])
            finish(quick, results[-1])
    assert compiled == []
    for order, finished in zip(orders, results, strict=True):
        expect([requests[n] for n in order], finished, early=True)
    loops = [n for request in results[0] for n in request.loops[1:]]
    assert set(loops) == {1, 2, 3}


def test_a_sampled_request_is_the_same_alone_and_among_others(quick):
    requests = draw_requests(VOCABULARY, 7)
    single = []
    for request in requests:
        single.append(quick.submit(*request))
        finish(quick, single[-1:])
    together = [quick.submit(*request) for request in requests]
    finish(quick, together)
    for first, other in zip(single, together, strict=True):
        assert (first.tokens, first.loops) == (other.tokens, other.loops)


def test_100_verified_texts_are_the_full_models(verifier):
    # Rules that guess now and then, always, and never.
    requests = greedy_requests(108, (None, 0.0, NEVER))
    finished = [verifier.submit(*request) for request in requests]
    finish(verifier, finished)
    for n in range(0, 108, 9):  # as many rows a call as above: one program
        expect(requests[n : n + 9], finished[n : n + 9], early=False)
    guessed = [n < 3 for request in finished for n in request.loops[1:]]
    assert 0 < sum(guessed) < len(guessed)


@pytest.mark.parametrize("name", slow_except((), SLOW, slow=["propagate"]))
def test_tokens_and_loops_are_those_of_one_row_at_a_time(name):
    engine, whole = depth_engine(name), WAYS[name][0].stack.loops
    requests = draw_requests(VOCABULARY, 9)
    expected = by_themselves(name, requests)
    loops = {n for by_name in expected for n in by_name.loops[1:]}
    assert min(loops) < whole and len(loops) > 1  # some leave, some do not
    with compiled_programs() as compiled:
        for order in (range(len(requests)), range(len(requests) - 1, -1, -1)):
            together = [engine.submit(*requests[n]) for n in order]
            finish(engine, together)
            for n, request in zip(order, together, strict=True):
                assert request.tokens == expected[n].tokens
                assert request.loops == expected[n].loops
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", INTERLEAVINGS)
@pytest.mark.parametrize(
    "kind", ["quick", pytest.param("verifier", marks=pytest.mark.sweep)]
)
def test_random_interleavings_change_no_token(kind, seeds, request):
    engine = request.getfixturevalue(kind)
    requests = draw_requests(VOCABULARY, 8)
    if kind == "verifier":
        requests = greedy_requests(8, (None, 0.0, NEVER))
    expected = [alone(engine, *request) for request in requests]
    for seed in seeds:
        interleave(engine, requests, expected, seed)


@pytest.mark.slow
def test_verified_texts_on_loop_1s_keys_are_the_full_models():
    engine = depth_engine("share", missing="verify")
    requests = greedy_requests(10, (None, 0.0, NEVER))
    finished = [engine.submit(*request) for request in requests]
    with compiled_programs() as compiled:
        finish(engine, finished)
    assert compiled == []
    model = build(FIRST)
    for (prompt, settings), request in zip(requests, finished, strict=True):
        assert request.tokens == tokens_of(model, prompt, settings, LENGTH)


def test_memory_is_counted_as_the_arrays_are(quick, verifier):
    model, length = build(QUICK), quick.config.length
    by_name = {}
    for engine in (quick, verifier):
        strategy = choose_strategy(model, engine.config, None)
        # The weights of a tick are a second copy of all adapters and untied norms.
        copied = copied_bytes(model, strategy)
        assert copied == tree_bytes(engine._programs._weights)
        assert copied >= tree_bytes(model.stack.adapters) > 0
        row = engine.row_bytes
        assert tree_bytes(engine._state) == engine.slots * row
        by_name[engine.config.missing] = row
        # So much more has to be free before as many slots fit.
        prompt = tree_bytes(model.init_cache(1, length))
        least = (copied + prompt + 2 * row) / 0.9
        sizes = dataclasses.replace(engine.config, slots="auto")
        assert slots_that_fit(model, sizes, strategy, free=math.ceil(least)) == 2
        assert slots_that_fit(model, sizes, strategy, free=math.floor(least) - 2) == 1
    # Lanes for tokens on their way, and longer rings.
    assert by_name["verify"] > by_name["propagate"]


def test_what_cannot_be_is_refused_in_a_sentence(verifier):
    model = build(QUICK)
    rule = ExitRule(kind="head", threshold=0.5)
    with pytest.raises(UserError, match="set exit too"):
        EngineConfig(missing="skip")
    with pytest.raises(UserError, match="needs a trained exit head"):
        build_engine(model, EngineConfig(slots=1, length=8, exit=rule))
    with pytest.raises(UserError, match="early exits need a recursive model"):
        build_engine(build_model("rnn"), EngineConfig(slots=1, length=8, exit=rule))
    with pytest.raises(UserError, match=r"\.threshold: must be >= 0 and <= 1"):
        RequestSettings(threshold=1.5)
    with pytest.raises(UserError, match="verify decodes greedily only"):
        verifier.submit([1, 2], RequestSettings(max_new_tokens=3))
