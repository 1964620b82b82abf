"""OpenAI's fields, limits, and texts that must not stop the event loop."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from recurjax.cli.chat import ChatOptions
from recurjax.cli.generate import GenerateOptions
from recurjax.data.chat import ChatTemplate
from recurjax.data.tokenizers import ByteTokenizer, TextSettings
from recurjax.inference.engine import RequestSettings
from recurjax.serving import app as serving
from recurjax.serving.app import App, Served
from recurjax.serving.bodies import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    NEUTRAL,
    read_options,
)
from recurjax.serving.worker import Worker
from tests.serving.running import GREEDY, told

# Parameters of `create` in the package openai, 3.57.
OPENAI_CHAT = {
    *("audio", "frequency_penalty", "function_call"),
    *("functions", "logit_bias", "logprobs"),
    *("max_completion_tokens", "max_tokens", "messages"),
    *("metadata", "modalities", "model"),
    *("moderation", "n", "parallel_tool_calls"),
    *("prediction", "presence_penalty", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "reasoning_effort"),
    *("response_format", "safety_identifier", "seed"),
    *("service_tier", "stop", "store"),
    *("stream", "stream_options", "temperature"),
    *("tool_choice", "tools", "top_logprobs"),
    *("top_p", "user", "verbosity"),
    *("web_search_options",),
}
OPENAI_COMPLETION = {
    *("best_of", "echo", "frequency_penalty"),
    *("logit_bias", "logprobs", "max_tokens"),
    *("model", "n", "presence_penalty"),
    *("prompt", "seed", "stop"),
    *("stream", "stream_options", "suffix"),
    *("temperature", "top_p", "user"),
}


def test_every_field_of_openais_is_known():
    assert OPENAI_CHAT <= CHAT_FIELDS
    assert OPENAI_COMPLETION <= COMPLETION_FIELDS


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_field_is_accepted_where_it_changes_nothing(name, server):
    chat = name in OPENAI_CHAT
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    values = NEUTRAL[name]
    fixed = isinstance(values, tuple)
    for value in [None, *(values if fixed else ["any", {"a": 1}])]:
        assert server.ask(path, body | GREEDY | {name: value})[0] == 200, value
    if fixed:
        status, message = told(server, path, body | GREEDY | {name: {"x": [7]}})
        assert status == 400 and message.startswith(f"{name} is not supported")


def test_an_unnamed_limit_is_what_the_slot_has_room_for(server):
    _, answer = server.ask("/v1/completions", {"prompt": "a", "temperature": 0})
    # 48 tokens with BOS and the prompt; the last one is sampled and not read.
    assert answer["usage"]["completion_tokens"] == 48 - 2 + 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_new_tokens_an_echoed_prompt_is_returned(server):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True}
    _, answer = server.ask("/v1/completions", body)
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert server.events("/v1/completions", body)[0]["choices"][0]["text"] == "abc"
    status, message = told(server, "/v1/completions", body | {"echo": False})
    assert status == 400 and "max_tokens must be an integer from 1" in message


def test_likeliest_tokens_of_one_text_are_all_told():
    from recurjax.serving.answers import Answers

    wanted = read_options({"logprobs": 3}, chat=False)
    answers = Answers(
        name="m", chat=False, options=wanted, tokenizer=ByteTokenizer(), prompt_tokens=1
    )
    # BOS and an id beyond the vocabulary have no text.
    row = answers._by_name([(97, -0.1), (256, -1.0), (257, -2.0)])
    assert row == {"a": -0.1, "": -1.0, "token_id:257": -2.0}


def test_a_model_has_its_own_sampling_where_a_request_names_none():
    settings = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True}
    defaults = TextSettings(generation=settings).sampling
    wanted = read_options({"top_p": 0.5}, chat=True, defaults=defaults).sampling
    assert (wanted.temperature, wanted.top_k, wanted.top_p) == (0.6, 20, 0.5)
    greedy = TextSettings(generation={"do_sample": False}).sampling
    assert read_options({}, chat=True, defaults=greedy).sampling.temperature == 0.0


def test_variables_reach_the_template_and_developers_are_its_system(server):
    body = {"messages": [{"role": "developer", "content": "x"}], **GREEDY}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    # The template writes the role's first letter: "s".
    _, answer = server.ask("/v1/chat/completions", body)
    assert answer["usage"]["prompt_tokens"] == len("sxa")
    body["chat_template_kwargs"] = {"messages": []}
    status, message = told(server, "/v1/chat/completions", body)
    assert status == 400 and "cannot set messages" in message


def test_more_texts_than_can_wait_are_refused_before_they_are_tokenized(
    server, monkeypatch
):
    monkeypatch.setattr(serving, "_encode", None)
    status, message = told(server, "/v1/completions", {"prompt": ["a"] * 99, "n": 64})
    assert status == 400 and "a request asks for 6336 texts" in message
    long = {"prompt": "a" * 49}
    status, message = told(server, "/v1/completions", long)
    assert status == 400 and "prompt has 49 bytes and a slot has 48 tokens" in message
    chat = {"messages": [{"role": "user", "content": "a" * 49}]}
    status, message = told(server, "/v1/chat/completions", chat)
    assert status == 400 and "messages has 49 bytes" in message
    ids = {"prompt": [1] * 49, "n": 6}
    status, message = told(server, "/v1/completions", ids)
    assert status == 400 and "prompt has 49 tokens and a slot has 48" in message


def served(**options) -> Served:
    # Its engine never starts: these routes need none.
    worker = Worker(lambda: pytest.fail("no engine"), most_waiting=1)
    return Served(name="m", worker=worker, tokenizer=ByteTokenizer(), **options)


async def answered(app: App, path: str, body: bytes, headers=()):
    """Calls the application without a server; returns status, headers and body."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "root_path": "",
    }
    await app.asgi(scope, receive, send)
    start = next(item for item in sent if item["type"] == "http.response.start")
    parts = [item.get("body", b"") for item in sent if item is not start]
    return start["status"], dict(start["headers"]), b"".join(parts)


def test_a_text_is_tokenized_outside_of_the_event_loop(monkeypatch):
    """Without clocks: the text waits until the loop has done something else."""
    went_on, plain = threading.Event(), serving._encode

    def slow(*args):
        assert threading.current_thread() is not threading.main_thread()
        assert went_on.wait(timeout=60)
        return plain(*args)

    monkeypatch.setattr(serving, "_encode", slow)

    async def both():
        app = App({"m": served(template=None)})
        asked = asyncio.create_task(
            answered(app, "/tokenize", json.dumps({"prompt": "ab"}).encode())
        )
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asked.done()
        went_on.set()
        return await asked

    status, _, body = asyncio.run(both())
    assert status == 200 and json.loads(body)["count"] == 3


def test_pages_of_named_origins_may_ask():
    app = App({"m": served(template=ChatTemplate(""))}, cors=["http://there"])
    body = json.dumps({"prompt": "ab"}).encode()

    def allowed(origin: bytes):
        call = answered(app, "/tokenize", body, [(b"origin", origin)])
        return asyncio.run(call)[1].get(b"access-control-allow-origin")

    assert allowed(b"http://there") == b"http://there"
    assert allowed(b"http://elsewhere") is None


@pytest.mark.parametrize("chat", [False, True])
def test_a_seed_of_0_is_a_seed(chat):
    """Two texts of it are equal; without a seed each has another."""
    assert [read_options({"seed": 0}, chat=chat).seed for _ in range(2)] == [0, 0]
    drawn = {read_options(body, chat=chat).seed for body in ({}, {"seed": None}) * 2}
    assert len(drawn) > 1
    assert read_options({"seed": -1}, chat=chat).seed == 2**32 - 1


def test_commands_without_a_seed_give_the_same_texts_but_for_a_talk():
    assert GenerateOptions(run=Path("runs/a")).seed == 0
    assert RequestSettings(max_new_tokens=1).seed == 0
    assert ChatOptions(run=Path("runs/a")).seed is None
