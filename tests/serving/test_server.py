"""The server over loopback, with a model whose text is known beforehand."""

import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recurjax.errors import UserError
from recurjax.serving import server as serving
from tests.serving.running import GREEDY, LETTERS, TEMPLATE, running, told


def test_a_completion_has_text_reason_and_usage(server):
    status, answer = server.ask("/v1/completions", {"prompt": "a", **GREEDY})
    assert status == 200 and answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("bcdefg", "length")
    usage = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert answer["usage"] == usage and answer["model"] == "abc"
    body = {"prompt": [[97], [109]], "stop": "p", "echo": True, **GREEDY}
    _, answer = server.ask("/v1/completions", body)
    assert [row["text"] for row in answer["choices"]] == ["abcdefg", "mno"]
    assert [row["finish_reason"] for row in answer["choices"]] == ["length", "stop"]


def test_a_stream_joins_to_the_whole_and_ends_with_the_usage(server):
    options = {"include_usage": True}
    body = {"prompt": "k", "stream_options": options, **GREEDY}
    pieces = server.events("/v1/completions", body)
    text = "".join(row["text"] for piece in pieces for row in piece["choices"])
    assert text == "lmnopq"
    assert pieces[-2]["choices"][0]["finish_reason"] == "length"
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["total_tokens"] == 8
    chat = {"messages": [{"role": "user", "content": "x"}], **GREEDY}
    pieces = server.events("/v1/chat/completions", chat)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "bcdefg"
    assert all(piece["object"] == "chat.completion.chunk" for piece in pieces)


def test_choices_have_streams_of_their_own_and_seeds_decide_them(server):
    body = {"prompt": "a", "n": 3, "temperature": 8.0, "seed": 5, "max_tokens": 9}
    _, first = server.ask("/v1/completions", body)
    _, again = server.ask("/v1/completions", body)
    texts = [row["text"] for row in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [row["text"] for row in again["choices"]]
    _, other = server.ask("/v1/completions", body | {"seed": 6})
    assert texts != [row["text"] for row in other["choices"]]


def test_probabilities_come_with_each_token(server):
    body = {"prompt": "a", "logprobs": 2, **GREEDY}
    _, answer = server.ask("/v1/completions", body)
    message = answer["choices"][0]["logprobs"]
    assert message["tokens"] == list("bcdefg") and len(message["top_logprobs"]) == 6
    for token, value, top in zip(
        message["tokens"],
        message["token_logprobs"],
        message["top_logprobs"],
        strict=True,
    ):
        assert top[token] == value == max(top.values()) and len(top) == 2
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, **GREEDY}
    _, answer = server.ask("/v1/chat/completions", chat | {"top_logprobs": 1})
    rows = answer["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in rows] == list("bcdefg")
    assert rows[0]["top_logprobs"][0]["token"] == "b" and rows[0]["bytes"] == [98]


def test_the_next_turn_reads_only_what_is_new(server):
    first = [{"role": "user", "content": "0123456789"}]
    options = {"temperature": 0, "max_tokens": 3}
    _, reply = server.ask("/v1/chat/completions", {"messages": first, **options})
    answer = reply["choices"][0]["message"]["content"]
    assert server.idle()
    counts = server.worker.engine.counts
    read, saved = counts.read_tokens, counts.reused_tokens
    turn = [*first, {"role": "assistant", "content": answer}]
    turn.append({"role": "user", "content": "z"})
    # The template writes the role's first letter, as it did before the answer.
    status, _ = server.ask("/v1/chat/completions", {"messages": turn, **options})
    assert status == 200 and counts.reused_tokens - saved == 14
    assert counts.read_tokens - read == 4


def test_small_routes(server):
    assert server.ask("/health") == (200, {"status": "ok"})
    _, models = server.ask("/v1/models")
    assert [row["id"] for row in models["data"]] == ["abc"]
    own = models["data"][0]["recurjax"]
    assert own["chat"] and own["sizes"][1] == {
        "tokens": 48,
        "state": 4800,
        "attention": 19200,
    }
    _, answer = server.ask("/tokenize", {"prompt": "hé"})
    assert answer == {"tokens": [256, 104, 195, 169], "count": 4}
    _, answer = server.ask("/detokenize", {"tokens": [104, 195, 169]})
    assert answer == {"prompt": "hé"}
    _, answer = server.ask("/tokenizer_info")
    assert answer["vocabulary"] == 257 and answer["chat_template"] == TEMPLATE
    _, text = server.ask("/metrics")
    for name in ("new_tokens_total", "active_slots", "first_token_seconds_bucket"):
        assert f"recurjax_{name}{{" in text


MALFORMED = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"prompt":' + b"[" * 60_000, "nested too deep"),
    (b"[" * 60_000, "must be a JSON object"),
    (b" NaN", "must be a JSON object"),
    ({}, "prompt must be"),
    ({"prompt": 7}, "prompt must be"),
    ({"prompt": []}, "prompt must be"),
    ({"prompt": [[]]}, "prompt must be"),
    ({"prompt": [-1]}, "prompt must be"),
    ({"prompt": [300]}, "the model's are 0 to 256"),
    ({"prompt": "a" * 60}, "a slot has 48"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer from 1"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens must be an integer"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens must be an integer"),
    ({"prompt": "a", "max_tokens": 10**9}, "a slot has 48"),
    ({"prompt": "a", "temperature": -1}, "temperature must be a number from 0"),
    ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
    ({"prompt": "a", "top_p": 0}, "top_p: must be > 0 and <= 1"),
    ({"prompt": "a", "top_p": 2}, "top_p must be a number from 0 to 1"),
    ({"prompt": "a", "n": 0}, "n must be an integer from 1 to 64"),
    ({"prompt": "a", "stop": [""]}, "stop must be"),
    ({"prompt": "a", "stop": 5}, "stop must be"),
    ({"prompt": "a", "stream": "yes"}, "stream must be true or false"),
    ({"prompt": "a", "seed": "x"}, "seed must be an integer"),
    ({"prompt": "a", "logprobs": 9}, "logprobs must be at most 2"),
    ({"prompt": "a", "exit": "confidence:0.7"}, "exit must be a number from 0 to 1"),
    ({"prompt": "a", "exit": 1.5}, "exit must be a number from 0 to 1"),
    ({"prompt": "a", "exit": 0}, "leave exit out, or start the server with --exit"),
    ({"prompt": "a", "return_exits": True}, "leave return_exits out"),
    ({"prompt": "a", "return_exits": 1}, "return_exits must be true or false"),
    ({"prompt": "a", "presence_penalty": 1}, "presence_penalty is not supported"),
    ({"prompt": "a", "wings": 2}, "a request has no field 'wings'"),
    ({"prompt": "a", "messages": []}, "a request has no field 'messages'"),
    ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options has no field 'x'"),
]


@pytest.mark.parametrize(("body", "said"), MALFORMED)
def test_what_is_wrong_with_a_body_is_one_sentence(server, body, said):
    status, message = told(server, "/v1/completions", body)
    assert status == 400 and said in message and "\n" not in message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages must be a list"),
        ({"messages": ["hello"]}, "messages[0] must have a role"),
        ({"messages": [{"role": "user"}]}, "messages[0]: content must be a string"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be a string"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "'prompt'"),
    ],
)
def test_what_is_wrong_with_a_talk_is_one_sentence(server, body, said):
    status, message = told(server, "/v1/chat/completions", body)
    assert status == 400 and said in message


def test_unknown_models_and_routes_are_404(server):
    assert told(server, "/v1/completions", {"model": "x", "prompt": "a"}) == (
        404,
        "there is no model 'x': name one of abc",
    )
    assert told(server, "/v1/wings", {}) == (404, "there is no POST /v1/wings")


def test_of_several_models_one_must_be_named(engine):
    body = {"prompt": "a", **GREEDY}
    with running(lambda: engine, names=("abc", "xyz")) as server:
        server.wait()  # until then every body is refused with 503
        answer = told(server, "/v1/completions", body)
        assert answer == (400, "model is missing: name one of abc, xyz")
        assert server.ask("/v1/completions", body | {"model": "xyz"})[0] == 200


def malformed(draw: random.Random) -> bytes:
    """A body that is wrong by how it was made."""
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0.5}
    kind = draw.randrange(4)
    if kind < 2:
        data = json.dumps(body).encode()
        at = draw.randrange(len(data))
        # Cut off, or with a character that JSON allows nowhere.
        return data[:at] if kind else data[:at] + bytes([draw.randrange(9)]) + data[at:]
    numbers = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    numbers += ("repetition_penalty", "logprobs", "exit", "prompt")
    values = ([], {"a": 1}, True, -1e12, [["x"], 3])
    if kind == 2:
        return json.dumps(body | {draw.choice(numbers): draw.choice(values)}).encode()
    name = "".join(draw.choices(LETTERS, k=9))
    return json.dumps(body | {name: draw.choice(values)}).encode()


@pytest.mark.slow
def test_500_malformed_bodies_are_each_refused_and_the_server_answers_on(server, capfd):
    draw = random.Random(0)
    for _ in range(500):
        data = malformed(draw)
        assert told(server, "/v1/completions", data)[0] == 400, data
    status, answer = server.ask("/v1/completions", {"prompt": "a", **GREEDY})
    assert status == 200 and answer["choices"][0]["text"] == "bcdefg"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_500_bodies_with_random_bytes_break_nothing(server):
    draw = random.Random(0)
    valid = json.dumps({"prompt": "abc", "max_tokens": 3, "temperature": 0.5}).encode()
    for _ in range(500):
        data = bytearray(valid)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        status, _ = server.ask("/v1/completions", data=bytes(data))
        assert status in (200, 400, 404)
    status, answer = server.ask("/v1/completions", {"prompt": "a", **GREEDY})
    assert status == 200 and answer["choices"][0]["text"] == "bcdefg"


def leave_early(server, prompt: str) -> None:
    """Begins a long stream, reads a little, and goes away."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": 40, "stream": True, "temperature": 0}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        link.sendall(head.encode() + body)
        link.recv(64)


def test_a_client_that_goes_away_frees_its_slot(server):
    leave_early(server, "a")
    assert server.idle()


def storm(server, count: int) -> None:
    """Complete answers, streams and clients that leave, at once; no slot is lost."""

    def one(number: int) -> None:
        letter = LETTERS[number % 26]
        want = (LETTERS * 2)[number % 26 + 1 :][:6]
        if number % 3 == 0:
            leave_early(server, letter)
            return
        while True:
            body = {"prompt": letter, "stream": number % 3 == 1, **GREEDY}
            status, answer = server.ask("/v1/completions", body)
            if status != 429:
                break
            time.sleep(0.05)
        assert status == 200
        if number % 3 == 2:
            assert answer["choices"][0]["text"] == want
            return
        events = [line[6:] for line in answer.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(pieces) == want

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))
    assert server.idle()


def test_many_clients_at_once_lose_no_slot(server):
    storm(server, 24)


@pytest.mark.slow
def test_1000_requests_with_cancels_lose_no_slot(server):
    storm(server, 1000)


def test_keys_queues_and_draining(engine):
    ready = threading.Event()

    def build():
        ready.wait(60)
        return engine

    with running(build, waiting=0, api_key="secret", template=None) as server:
        assert server.ask("/health")[0] == 503  # being compiled
        assert told(server, "/v1/completions", {"prompt": "a"})[0] == 401
        key = {"Authorization": "Bearer secret"}
        ready.set()
        server.wait()
        body = json.dumps({"prompt": "a", **GREEDY}).encode()
        status, answer = server.ask("/v1/completions", data=body, headers=key)
        assert status == 200 and answer["choices"][0]["text"] == "bcdefg"
        # More than ever fit, and more than fit now.
        server.worker._streams.add(waiting := object())
        for count, want, message in (
            (3, 400, "asks for 3 texts .* takes 2 at once"),
            (2, 429, "1 requests are open and the server takes 2: try again later"),
        ):
            many = json.dumps({"prompt": "a", "n": count, **GREEDY}).encode()
            status, answer = server.ask("/v1/completions", data=many, headers=key)
            assert status == want and re.search(message, answer["error"]["message"])
        server.worker._streams.discard(waiting)
        talk = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        status, answer = server.ask("/v1/chat/completions", data=talk, headers=key)
        assert status == 400 and "has no chat template" in answer["error"]["message"]
        server.worker.draining = True
        status, answer = server.ask("/v1/completions", data=body, headers=key)
        assert (
            status == 503 and "accepts no more requests" in answer["error"]["message"]
        )


def test_a_port_in_use_is_told_before_anything_is_loaded():
    caught = pytest.raises(UserError, match="cannot listen on 127.0.0.1 port .*--port")
    with serving.bind("127.0.0.1", 0) as bound, caught:
        serving.bind("127.0.0.1", bound.getsockname()[1])
