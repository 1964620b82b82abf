"""Slots, queue, stops, kept states and refusals, on one small model."""

import gc
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.exits import ExitRule
from recurjax.inference.engine import (
    Engine,
    EngineConfig,
    RequestSettings,
    memory,
    programs,
)
from recurjax.inference.engine.memory import row_bytes, slots_that_fit, tree_bytes
from recurjax.inference.engine.prefix_cache import PrefixCache
from recurjax.inference.engine.slots import SequenceWise, empty_slots
from recurjax.inference.generate import generate
from recurjax.inference.sampling import SamplingConfig
from recurjax.types import Tokens
from tests.inference.engine.models import (
    GREEDY,
    LENGTH,
    SIZES,
    SLOTS,
    VARIANTS,
    alone,
    build_engine,
    build_model,
    draw_requests,
    finish,
)

BYTES = ByteTokenizer()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORT = EngineConfig(slots=2, length=32, prefill_tokens=8, steps=3, top_logprobs=2)


@pytest.fixture(scope="module")
def engine():
    return build_engine(build_model("rnn"))


@pytest.fixture(scope="module")
def speller(cycle):
    """An engine that goes on with the alphabet."""
    return build_engine(cycle(LETTERS), SHORT, tokenizer=BYTES)


def greedy(**wishes) -> RequestSettings:
    return RequestSettings(**{"max_new_tokens": 20, "sampling": GREEDY} | wishes)


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (("f",), "bcde", "stop"),
        (("de", "zz"), "bc", "stop"),
        (("zz",), LETTERS[1:21], "length"),
        ((), LETTERS[1:21], "length"),
    ],
)
def test_texts_end_before_a_stop_string(speller, stop, text, reason):
    requests = [speller.submit(list(b"a"), greedy(stop=stop)) for _ in range(3)]
    finish(speller, requests)
    for request in requests:
        assert (request.text, request.reason) == (text, reason)


def test_stop_tokens_end_a_request(speller):
    result = speller.submit(list(b"a"), greedy(stop_tokens=(ord("d"),)))
    assert finish(speller, [result]) == [list(b"bcd")]
    assert (result.text, result.reason) == ("bc", "eos")


@pytest.mark.slow
def test_the_eos_ends_a_request_and_can_be_ignored(cycle):
    model = cycle(LETTERS)
    ended = build_engine(model, SHORT, eos=ord("c"))
    assert alone(ended, list(b"a"), greedy()) == list(b"bc")
    going = alone(ended, list(b"a"), greedy(ignore_eos=True))
    assert bytes(going).decode() == LETTERS[1:21]


@pytest.mark.slow
def test_pieces_of_text_come_before_the_end_and_are_those_of_generate(speller, cycle):
    request = speller.submit(list(b"x"), greedy(stop=("ijkl",)))
    seen = []
    while not request.done:
        speller.step()
        seen.append(request.text)
    assert len(set(seen)) > 2
    assert all(later.startswith(text) for text, later in pairwise(seen))
    generation = generate(
        cycle(LETTERS),
        ["x"],
        tokenizer=BYTES,
        bos=False,
        max_new_tokens=20,
        sampling=GREEDY,
        stop=["ijkl"],
        chunk=4,
    )
    assert request.text == generation.texts[0] == "yzabcdefgh"


def test_probabilities_are_those_of_the_model_before_temperature(speller, cycle):
    wish = greedy(
        max_new_tokens=5, logprobs=True, sampling=SamplingConfig(temperature=3.0)
    )
    request = speller.submit(list(b"k"), wish)
    quiet = speller.submit(list(b"k"), greedy(max_new_tokens=5))
    finish(speller, [request, quiet])
    model = cycle(LETTERS)
    ids = np.array([[ord("k"), *request.tokens[:-1]]], np.int32)
    logits = jax.jit(lambda m, i: m(Tokens(i), m.init_cache(1, 0))[0])(model, ids)
    logs = np.asarray(jax.nn.log_softmax(logits[0]))
    own = logs[np.arange(5), request.tokens]
    np.testing.assert_allclose(request.logprobs, own, rtol=1e-4, atol=1e-5)
    for row, top in zip(logs, request.top, strict=True):
        best = np.sort(row)[::-1][:2]
        np.testing.assert_allclose([value for _, value in top], best, rtol=1e-4)
        assert row[top[0][0]] == row.max()
    assert quiet.logprobs == quiet.top == []


def test_a_freed_slot_is_filled_before_the_next_step(engine):
    draw = np.random.default_rng(0)
    first = [
        engine.submit(draw.integers(9, size=2), greedy(max_new_tokens=most))
        for most in (14, 14, 2)
    ]
    later = engine.submit([1, 2], greedy(max_new_tokens=14))
    engine.step()
    # The slot became free in the first call's first step, and the call ended there,
    # for somebody was waiting.
    assert [len(request.tokens) for request in first] == [2, 2, 2]
    assert first[2].done and engine.active == 2 and engine.waiting == 1
    engine.step()
    assert engine.active == 3 and len(later.tokens) == 4
    engine.cancel(first[0])
    last = engine.submit([3], greedy(max_new_tokens=2))
    engine.step()
    assert last.done and first[0].reason == "cancelled"
    finish(engine, [*first, later, last])


def test_a_long_prompt_is_read_in_pieces_between_the_steps_of_others(engine):
    draw = np.random.default_rng(0)
    short = engine.submit([1], greedy(max_new_tokens=14))
    engine.step()
    long = engine.submit(draw.integers(9, size=16), greedy(max_new_tokens=1))
    read, result = engine.counts.read_tokens, len(short.tokens)
    engine.step()
    assert engine.counts.read_tokens - read == 8 and not long.tokens
    assert len(short.tokens) == result + 3
    engine.step()
    assert engine.counts.read_tokens - read == 16 and long.done
    engine.cancel(short)


def test_requests_that_wait_or_are_being_read_can_be_cancelled(engine):
    draw = np.random.default_rng(0)
    requests = [
        engine.submit(draw.integers(9, size=16), greedy(max_new_tokens=1))
        for _ in range(3)
    ]
    engine.step()  # half of the first one's prompt
    engine.cancel(requests[0])
    engine.cancel(requests[2])
    engine.cancel(requests[2])  # a second time does nothing
    finish(engine, requests)
    assert [request.reason for request in requests] == [
        "cancelled",
        "length",
        "cancelled",
    ]
    assert not engine.busy


@pytest.mark.slow
def test_logits_that_are_not_finite_end_their_request_alone():
    def weight(path, leaf):
        return leaf.at[3].set(np.nan) if "w_embedding" in str(path) else leaf

    broken = jax.tree_util.tree_map_with_path(weight, build_model("transformer"))
    engine = build_engine(broken)
    bad = engine.submit([3], greedy(max_new_tokens=4))
    good = engine.submit([5], greedy(max_new_tokens=4))
    finish(engine, [bad, good])
    assert (bad.reason, bad.tokens) == ("not_finite", [])
    assert good.reason == "length" and len(good.tokens) == 4


@pytest.mark.slow
@pytest.mark.parametrize("missing", [None, "skip", "verify"])
def test_a_float64_model_runs_where_64_bit_types_are_enabled(missing):
    name = "transformer" if missing is None else "relaxed_recursive_transformer"
    switches, config = VARIANTS[name]
    sizes = replace(SIZES, states_gib=0.0, prefill_tokens=SLOTS * LENGTH)
    if missing is not None:
        rule = ExitRule(kind="confidence", threshold=1.0)  # none leaves early
        sizes = replace(sizes, exit=rule, missing=missing)
    with jax.enable_x64(True):
        model = switches.build(replace(config, dtype="float64"))
        engine = Engine(model, sizes)
        wish = greedy(max_new_tokens=9, logprobs=True)
        requests = [engine.submit([1, n], wish) for n in range(5)]
        finish(engine, requests)
        ids = np.array(
            [[*request.prompt, *request.tokens[:-1]] for request in requests], np.int32
        )
        logits = jax.jit(lambda m, i: m(Tokens(i), m.init_cache(5, 0))[0])(model, ids)
        logs = np.asarray(jax.nn.log_softmax(logits))[:, 1:]
    tokens = np.array([request.tokens for request in requests])
    np.testing.assert_array_equal(tokens, logs.argmax(-1))
    # float32 would be off by 1e-7 of it.
    result = np.array([request.logprobs for request in requests])
    np.testing.assert_allclose(result, logs.max(-1), rtol=1e-12)


def live_bytes() -> int:
    gc.collect()
    return sum(leaf.nbytes for leaf in jax.live_arrays())


def run_many(engine, count: int) -> None:
    requests = draw_requests(17, 20)
    engine.prefix_cache = PrefixCache(2**13)
    finish(engine, [engine.submit(*requests[n % 20]) for n in range(40)])
    before = live_bytes()
    for _ in range(count // 40):
        finish(engine, [engine.submit(*requests[n % 20]) for n in range(40)])
        assert engine.prefix_cache.used_bytes <= 2**13
    assert live_bytes() <= before + 2**12
    assert not engine._texts


@pytest.mark.slow
def test_memory_is_flat_over_many_requests(engine):
    run_many(engine, 120)


@pytest.mark.sweep
def test_memory_is_flat_over_10_000_requests(engine):
    run_many(engine, 10_000)


def state(value: float):
    return {"h": jax.device_put(np.full(8, value, np.float32))}


def test_states_not_used_for_longest_leave_first():
    pool, tokens = PrefixCache(3 * 32), np.arange(20, dtype=np.int32)
    for length in (2, 4, 6):
        pool.put(tokens[:length], state(length))
    assert pool.find(tokens).length == 6
    assert pool.find(tokens[:3]).length == 2  # now the one used last
    pool.put(tokens[:8], state(8))
    assert len(pool) == 3 and pool.used_bytes == 96
    assert not pool.has(tokens[:4]) and pool.has(tokens[:2])
    assert pool.find(tokens[:5]).length == 2
    pool.put(tokens[:8], state(8))
    assert len(pool) == 3 and pool.used_bytes == 96


def test_a_state_serves_only_texts_that_begin_with_its_own():
    pool, tokens = PrefixCache(2**10), np.arange(9, dtype=np.int32)
    pool.put(tokens[:4], state(4))
    other = tokens.copy()
    other[1] = 7
    assert pool.find(other) is None
    assert pool.find(tokens[:4]) is None  # its last state is not kept
    pool.put(tokens[:4], state(4), state(0)["h"])
    assert pool.find(tokens[:4]).length == 4
    assert pool.find(tokens[:3]) is None
    PrefixCache(8).put(tokens, state(1))  # larger than the pool: not kept, no error


def test_auto_takes_the_slots_that_fit_and_too_many_are_refused():
    model, strategy = build_model("transformer"), SequenceWise()
    row = row_bytes(model, LENGTH, strategy)
    cache = model.init_cache(1, LENGTH)
    # The tokens seen, and some numbers more; of the arrays themselves.
    assert row > 17 + tree_bytes([group.keys for group in cache.groups]) * 2
    one, three = (
        empty_slots(model, strategy=strategy, rows=rows, length=LENGTH)
        for rows in (1, 3)
    )
    assert tree_bytes(three) - tree_bytes(one) == 2 * row
    sizes = EngineConfig(slots="auto", length=LENGTH)
    assert slots_that_fit(model, sizes, strategy, free=10 * row) == 8
    assert slots_that_fit(model, sizes, strategy, free=2**40) == 256
    many = EngineConfig(slots=9, length=LENGTH)
    with pytest.raises(UserError, match="only 8 slots fit"):
        slots_that_fit(model, many, strategy, free=10 * row)
    with pytest.raises(UserError, match="lower the slot length or states_gib"):
        slots_that_fit(model, sizes, strategy, free=row)


def test_files_that_a_host_keeps_in_memory_count_as_free(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:  8000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    model, strategy = build_model("transformer"), SequenceWise()
    sizes = EngineConfig(slots="auto", length=LENGTH)
    free = slots_that_fit(model, sizes, strategy, free=8000 << 10)
    assert slots_that_fit(model, sizes, strategy) == free > 1


@pytest.mark.parametrize(
    ("prompt", "wish", "said"),
    [
        ([], {}, "no tokens"),
        ([1, 17], {}, "the model's are 0 to 16"),
        ([1] * 16, {"max_new_tokens": 2}, "16 tokens and needs 17 .* a slot has 16"),
        ([1], {"stop": ("a",)}, "stop strings need a tokenizer"),
        ([1], {"stop_tokens": tuple(range(9))}, "at most 8 tokens that end it, got 9"),
        ([1], {"keep": (2,)}, "keep must be lengths from 1 to"),
    ],
)
def test_requests_that_cannot_run_are_refused_in_a_sentence(engine, prompt, wish, said):
    with pytest.raises(UserError, match=said):
        engine.submit(prompt, greedy(**{"max_new_tokens": 3} | wish))
    assert not engine.busy


@pytest.mark.parametrize(
    ("kind", "wish", "said"),
    [
        (
            RequestSettings,
            {"max_new_tokens": 0},
            r"\.max_new_tokens: must be >= 1, got 0",
        ),
        (RequestSettings, {"seed": 2**32}, r"\.seed: must be >= 0 and < 2\^32"),
        (RequestSettings, {"stop": ("",)}, "non-empty strings"),
        (EngineConfig, {"slots": 0}, r"EngineConfig\.slots: must be >= 1, got 0"),
        (EngineConfig, {"length": 0}, r"EngineConfig\.length: must be >= 1, got 0"),
        (
            EngineConfig,
            {"states_gib": 1.0, "prefill": "sweeps:2"},
            "with prefill exact only",
        ),
    ],
)
def test_settings_out_of_range_are_refused_by_name(kind, wish, said):
    with pytest.raises(UserError, match=said):
        kind(**wish)


def test_engines_that_cannot_be_are_refused_in_a_sentence():
    model = build_model("rnn")
    with pytest.raises(UserError, match="for this model, got 'sweeps:2'"):
        build_engine(model, EngineConfig(slots=1, length=8, prefill="sweeps:2"))
    with pytest.raises(UserError, match="257 tokens and the model only 17"):
        build_engine(model, SIZES, tokenizer=BYTES)


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (1, [1]),
        (16, [16]),
        (65, [65]),
        (144, [128, 16]),
        (200, [200]),
        (161, [128, 33]),
    ],
)
def test_much_padding_is_another_call(count, parts):
    sizes = object.__new__(programs.Programs)
    sizes.widths = EngineConfig(prefill_tokens=512).widths
    matches = []
    while count:
        matches.append(sizes.first_part(count))
        count -= matches[-1]
    assert matches == parts


@pytest.mark.slow
def test_a_prompt_that_is_read_in_parts_has_the_same_tokens(monkeypatch):
    sizes = EngineConfig(slots=2, length=48, prefill_tokens=32, steps=3)
    engine = build_engine(build_model("rnn"), sizes)
    calls, read = [], engine._programs.read
    prompt = np.random.default_rng(0).integers(9, size=18)

    def counted(cache, ids, *, adapter):
        calls.append(len(ids))
        return read(cache, ids, adapter=adapter)

    monkeypatch.setattr(engine._programs, "read", counted)
    whole = alone(engine, prompt, greedy())
    monkeypatch.setattr(programs, "_WORTH_A_CALL", 8)
    assert alone(engine, prompt, greedy()) == whole
    assert calls == [18, 16, 2]


def test_widths_double_up_to_the_longest_piece():
    assert EngineConfig(prefill_tokens=100).widths == (16, 32, 64, 100)
    assert EngineConfig(prefill_tokens=8).widths == (8,)
    assert EngineConfig(prefill_tokens=64).widths == (16, 32, 64)
    assert SIZES.slots == SLOTS
