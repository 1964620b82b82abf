"""What answers contain besides their text: probabilities, ids, what ends them."""

import asyncio

import numpy as np
import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.inference.engine import RequestSettings
from recurjax.serving.answers import Answers, Choice
from recurjax.serving.bodies import read_options
from recurjax.serving.worker import AnswerStream, News
from tests.serving.running import GREEDY, running, told


@pytest.mark.slow
def test_an_echoed_prompt_has_probabilities_too(server):
    plain = {"prompt": "a", "logprobs": 1, **GREEDY}
    _, answer = server.ask("/v1/completions", plain)
    asked = answer["choices"][0]["logprobs"]
    # The first half of that text as the prompt: every place has the same probability.
    body = plain | {"prompt": "abcd", "max_tokens": 3, "echo": True}
    _, answer = server.ask("/v1/completions", body)
    (choice,) = answer["choices"]
    matches = choice["logprobs"]
    assert choice["text"] == "abcdefg" and matches["tokens"] == ["", *"abcdefg"]
    assert matches["token_logprobs"][0] is None and matches["top_logprobs"][0] is None
    assert matches["token_logprobs"][2:] == pytest.approx(asked["token_logprobs"])
    values, tops = matches["token_logprobs"], matches["top_logprobs"]
    places = list(zip(values, tops, strict=True))[2:]
    # What clients ask to learn whether a text is the greedy one: exactly the largest.
    for value, top in places:
        assert value == max(top.values())
    assert matches["text_offset"] == [0, *range(7)]
    pieces = server.events("/v1/completions", body)
    rows = [row for piece in pieces for row in piece["choices"]]
    assert "".join(row["text"] for row in rows) == "abcdefg"
    values = [value for row in rows for value in row["logprobs"]["token_logprobs"]]
    assert values == matches["token_logprobs"]


@pytest.mark.slow
def test_probabilities_of_prompts_can_be_left_out(engine):
    with running(lambda: engine) as server:
        server.wait()
        body = {"prompt": "a", "echo": True, "logprobs": 1}
        status, message = told(server, "/v1/completions", body)
    assert status == 400 and "leave echo or logprobs out" in message


def test_the_ids_of_tokens_come_where_they_are_asked_for(server):
    body = {"prompt": "a", "return_token_ids": True, **GREEDY}
    _, answer = server.ask("/v1/completions", body)
    assert answer["choices"][0]["token_ids"] == list(b"bcdefg")
    pieces = server.events("/v1/completions", body)
    ids = [row.get("token_ids", []) for piece in pieces for row in piece["choices"]]
    assert sum(ids, []) == list(b"bcdefg")


def test_a_models_own_ends_end_its_texts(engine):
    with running(lambda: engine, ends=(ord("e"),)) as server:
        server.wait()
        body = {"prompt": "a", **GREEDY}
        _, answer = server.ask("/v1/completions", body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 4
        _, answer = server.ask("/v1/completions", body | {"ignore_eos": True})
        assert answer["choices"][0]["text"] == "bcdefg"


EURO = "a€b".encode()


def answers(*, chat: bool) -> tuple[Answers, Choice]:
    asked = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    result = Answers(
        name="m",
        chat=chat,
        options=read_options({"model": "m", **asked}, chat=chat),
        tokenizer=ByteTokenizer(),
        prompt_tokens=1,
    )

    async def stream() -> AnswerStream:
        return AnswerStream(np.array([97]), RequestSettings(), asyncio.Queue())

    return result, Choice(index=0, stream=asyncio.run(stream()), begin="")


def news_of(tokens) -> News:
    top = [[(token, -1.0), (0x80, -2.0)] for token in tokens]
    return News(
        text="",
        tokens=[*tokens],
        logprobs=[-1.0] * len(tokens),
        top=top,
        exits=[],
        reason=None,
    )


def test_parts_of_a_character_are_told_by_their_bytes():
    writer, choice = answers(chat=False)
    choice.take(news_of(EURO))
    (row,) = writer.response([choice])["choices"]
    parts = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    message = row["logprobs"]
    assert message["tokens"] == ["a", *parts, "b"]
    # Two parts of characters are two entries, which include the drawn one.
    assert message["top_logprobs"][1] == {"bytes:\\xe2": -1.0, "bytes:\\x80": -2.0}
    # A character has the offset of its first byte.
    assert message["text_offset"] == [0, 1, 2, 2, 2]


def test_chats_tell_the_bytes_that_join_to_the_text():
    writer, choice = answers(chat=True)
    choice.take(news_of(EURO))
    (row,) = writer.response([choice])["choices"]
    rows = row["logprobs"]["content"]
    assert b"".join(bytes(row["bytes"]) for row in rows) == EURO
    assert rows[1]["top_logprobs"][1]["bytes"] == [0x80]


def test_offsets_go_on_from_piece_to_piece():
    writer, choice = answers(chat=False)
    pieces = [
        piece
        for cut in (EURO[:3], EURO[3:], b"cd")
        for piece in writer.pieces(choice, news_of(cut))
    ]
    offsets = [row["logprobs"]["text_offset"] for p in pieces for row in p["choices"]]
    assert offsets == [[0, 1, 2], [2, 2], [3, 4]]
