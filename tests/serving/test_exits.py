"""A server whose tokens leave a recursive model early, by each request's threshold."""

import dataclasses

import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.exits import ExitRule
from recurjax.inference.engine import Engine, EngineConfig
from tests.serving.running import GREEDY, running
from tests.variants.relaxed_recursive_transformer.switches import build, small

SIZES = EngineConfig(
    slots=2,
    length=24,
    prefill_tokens=16,
    steps=4,
    exit=ExitRule(kind="confidence", threshold=1.0),
)


@pytest.fixture(scope="module")
def exiting():
    config = dataclasses.replace(small(loops=2, layers=2), vocabulary=257)
    options = {"tokenizer": ByteTokenizer()}
    engine = Engine(build(config), SIZES, **options)
    with running(lambda: engine) as result:
        result.wait()
        yield result


def left_after(result) -> list[int]:
    return [loop for _, loop in result]


def test_a_request_chooses_its_threshold_and_is_told_its_exits(exiting):
    body = {"prompt": "ab", "return_exits": True, "ignore_eos": True, **GREEDY}
    by_name = {}
    for threshold in (None, 0, 1):
        wish = {} if threshold is None else {"exit": threshold}
        status, answer = exiting.ask("/v1/completions", body | wish)
        assert status == 200
        (choice,) = answer["choices"]
        assert "".join(text for text, _ in choice["exits"]) == choice["text"]
        by_name[threshold] = left_after(choice["exits"])
        pieces = exiting.events("/v1/completions", body | wish)
        rows = [row for piece in pieces for row in piece["choices"]]
        # Each piece of the stream tells the exits of its own text.
        for row in rows:
            assert "".join(text for text, _ in row["exits"]) == row["text"]
        assert [item for row in rows for item in row["exits"]] == choice["exits"]
    # The first token is the prompt's, which runs all loops.
    assert by_name == {None: [2] * 6, 0: [2] + [1] * 5, 1: [2] * 6}


def test_talks_are_told_their_exits_where_they_ask(exiting):
    body = {"messages": [{"role": "user", "content": "x"}], "exit": 0, **GREEDY}
    _, answer = exiting.ask("/v1/chat/completions", body)
    assert "exits" not in answer["choices"][0]
    _, answer = exiting.ask("/v1/chat/completions", body | {"return_exits": True})
    (choice,) = answer["choices"]
    joined = "".join(text for text, _ in choice["exits"])
    assert joined == choice["message"]["content"]
    assert set(left_after(choice["exits"])[1:]) == {1}


def test_exits_are_counted_by_loop(exiting):
    def counted() -> list[float]:
        _, text = exiting.ask("/metrics")
        name = 'recurjax_exits_total{loops="%d",model="abc"} '
        return [float(text.split(name % loop)[1].split()[0]) for loop in (1, 2)]

    body = {"prompt": "ab", "ignore_eos": True, **GREEDY}
    before = counted()
    assert exiting.ask("/v1/completions", body | {"exit": 0})[0] == 200
    assert exiting.ask("/v1/completions", body | {"exit": 1, "n": 2})[0] == 200
    early, late = (b - a for a, b in zip(before, counted(), strict=True))
    assert (early, late) == (5, 10)
