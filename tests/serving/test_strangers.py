"""What a server refuses by who asks, by lengths and by time, before any work."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recurjax.cli import serve as command
from recurjax.cli.serve import ServeOptions
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.serving import app as serving
from recurjax.serving import bodies as reading
from recurjax.serving import server as port
from recurjax.serving.app import LOOPBACK, App, Served
from recurjax.serving.bodies import (
    LONGEST_OPTIONS,
    LONGEST_ROLE,
    MOST_MESSAGES,
    MOST_NAMES,
)
from recurjax.serving.worker import Worker
from tests.serving.running import GREEDY, told
from tests.serving.test_fields import answered, served
from tests.source_tree import ROOT

BODY = json.dumps({"prompt": "ab"}).encode()


def status_of(app: App, *headers: tuple[str, str], body: bytes = BODY) -> int:
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    return asyncio.run(answered(app, "/tokenize", body, pairs))[0]


@pytest.mark.parametrize(
    "host, status",
    {
        "localhost": 200,
        "localhost:8000": 200,
        "LocalHost:8000": 200,
        "127.0.0.1:80": 200,
        "[::1]:8000": 200,
        "here.example": 200,
        "evil.example": 403,
        "evil.example:8000": 403,
        "localhost.evil.example": 403,
        "127.0.0.1.evil.example": 403,
        "10.1.2.3": 403,
        "": 403,
    }.items(),
)
def test_a_server_answers_to_its_own_names_alone(host, status):
    """A Host that is not the server's is refused.

    A page whose name points at this machine could else read every answer.
    """
    app = App({"m": served(template=None)}, hosts=(*LOOPBACK, "here.example"))
    assert status_of(app, ("host", host)) == status


def test_at_every_address_any_address_is_a_name():
    app = App({"m": served(template=None)}, addresses=True)
    for host in ("10.1.2.3:80", "[2001:db8::1]:80"):
        assert status_of(app, ("host", host)) == 200
    assert status_of(app, ("host", "evil.example")) == 403


@pytest.mark.parametrize(
    "origin, status",
    {
        "http://localhost:8000": 200,
        "http://there": 200,
        "http://there:81": 403,
        "http://evil.example": 403,
        "https://localhost": 403,
        "null": 403,
        "": 403,
    }.items(),
)
def test_pages_of_other_sites_may_not_ask(origin, status):
    """An Origin that `--cors` does not name is refused."""
    app = App({"m": served(template=None)}, cors=["http://there"])
    host = ("host", "localhost:8000")
    assert status_of(app, host, ("origin", origin)) == status


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
)
def test_a_body_must_say_that_it_is_json(kind, server):
    """A body that does not say that it is JSON is refused."""
    headers = {"content-type": kind}
    status, made = server.ask("/tokenize", data=BODY, headers=headers)
    assert status == 415
    assert "content-type must be application/json" in made["error"]["message"]
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.ask("/tokenize", data=BODY, headers=headers)[0] == 200


def bodies(app: App, *parts: dict, path: str = "/tokenize"):
    """Calls a route with the parts of a body; the client then waits for ever."""
    left, sent = list(parts), []

    async def receive():
        if left:
            return {"type": "http.request", "more_body": True, **left.pop(0)}
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    asyncio.run(app.asgi(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["message"]


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(serving, "BODY_SECONDS", 0.0)
    app = App({"m": served(template=None)})
    assert bodies(app) == (408, "the body did not arrive within 0 s")
    assert app._held == 0


def test_bodies_are_bounded_each_and_together(monkeypatch):
    monkeypatch.setattr(serving, "LARGEST_BODY", 100)
    monkeypatch.setattr(serving, "LARGEST_BODIES", 250)
    app = App({"m": served(template=None)})
    piece = {"body": b" " * 60}
    refused = (413, "the body exceeds the 100 bytes that /tokenize accepts: send less")
    assert bodies(app, piece, piece) == refused
    assert app._held == 0
    app._held = 200  # of other requests
    status, message = bodies(app, piece)
    assert status == 429 and "try again later" in message
    assert app._held == 200


def with_slots(length: int, tokenizer: Any = None) -> App:
    """Returns an application of a model with two slots and a place in the queue."""
    model = served(template=None)
    model.worker.engine = cast(
        Any, SimpleNamespace(slots=2, config=SimpleNamespace(length=length))
    )
    tokenizer = tokenizer or model.tokenizer
    return App({"m": replace(model, tokenizer=tokenizer)})


def test_a_body_has_16_mib_at_most():
    assert serving.LARGEST_BODY == 16 * 2**20
    app, path = with_slots(2**30), "/v1/completions"
    largest = {"body": b" " * serving.LARGEST_BODY, "more_body": False}
    assert bodies(app, largest, path=path)[0] == 400  # no JSON
    more = {"body": b" " * (serving.LARGEST_BODY + 1)}
    refused = (
        413,
        "the body exceeds the 16,777,216 bytes that /v1/completions accepts: send less",
    )
    assert bodies(app, more, path=path) == refused


@pytest.mark.parametrize(
    "path, longest, largest",
    [
        ("/v1/completions", 1, 2**20 + 3 * 100 * 12),
        ("/v1/completions", 7, 2**20 + 3 * 100 * 42),
        ("/v1/completions", None, 2**20 + 3 * 100 * 6 * 128),
        ("/v1/chat/completions", 7, 2**20 + 100 * 42),
        ("/tokenize", 7, 2**22),
        ("/detokenize", 7, 2**20 + 2**16 * 12),
    ],
)
def test_a_body_has_what_its_route_can_use_at_most(path, longest, largest):
    """Nothing of a longer one is parsed: it would be no JSON."""
    app = with_slots(100, SimpleNamespace(longest_token=longest, vocabulary=9))
    piece = {"body": b" " * largest}
    assert bodies(app, piece | {"more_body": False}, path=path)[0] == 400
    end = {"body": b" ", "more_body": False}
    refused = (
        413,
        f"the body exceeds the {largest:,} bytes that {path} accepts: send less",
    )
    assert bodies(app, piece, end, path=path) == refused
    assert app._held == 0


@pytest.mark.parametrize("length, longest, most", [(100, 7, 4200), (50, 128, 38400)])
def test_a_text_of_a_body_is_what_a_slot_holds_at_most(length, longest, most):
    """A longer one is refused before JSON reads it, its escapes included."""
    tokenizer = SimpleNamespace(longest_token=longest, vocabulary=9)
    app, path = with_slots(length, tokenizer), "/v1/completions"
    most += 2**20
    for size, status in ((most, 400), (most + 1, 413)):
        # What JSON reads is no JSON: a second text follows the first.
        data = b'{"prompt":"' + b"a" * size + b'" "'
        answer, message = bodies(app, {"body": data, "more_body": False}, path=path)
        assert answer == status, message
    assert (
        message == f"a text of the body may have {most:,} bytes here, escapes included"
    )


def test_a_body_is_for_models_that_take_requests():
    compiling, app = served(template=None), with_slots(100)
    models = {"a": compiling, **app._models}
    assert App(models)._room(chat=True) == app._room(chat=True)
    status, message = bodies(App({"a": compiling}), path="/v1/chat/completions")
    assert status == 503 and "is being compiled" in message


@pytest.mark.parametrize(
    "body, status",
    {
        '{"tokens": [1], "a": {"b": 2}}': 200,
        '{"tokens": [1], "a": {"b": 2, "c": 3}}': 413,
        '{"tokens": [1], "a": {"b": "::::::"}}': 200,
        r'{"tokens": [1], "a": {"b": "\":\\\":::::"}}': 200,
        r'{"tokens": [1], "a": {"b": "\\", "::": 1}}': 413,
        '{"tokens": [1,1,1,1,1,1,1]}': 200,
        '{"tokens": [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}': 413,
        '{"a": [[],[],[],[],[],[],[],[],[],[]]}': 413,
        '{"a": ["x","x","x","x","x","x","x","x","x","x"]}': 413,
        '{"tokens": [1], "a": ",,,,,,,,,,,,,,,,,[[[[[[[{{{{{{{"}': 200,
        r'{"tokens": [1], "a": "\",\\\",,,,,,,,,,[[[[[[[[[[[[["}': 200,
        r'{"tokens": [1], "a": "\\",,,,,,,,,,[[[[[[[[[[[[["}': 413,
    }.items(),
)
def test_a_body_has_no_more_names_and_values_than_its_route_can_use(
    body, status, monkeypatch
):
    """They are counted without parsing; colons, commas and brackets of texts do not
    count.
    """
    monkeypatch.setattr(reading, "MOST_NAMES", 3)
    monkeypatch.setattr(serving, "MOST_IDS", 16)
    monkeypatch.setitem(App._read.__kwdefaults__, "values", 16)
    answer = asyncio.run(answered(with_slots(9), "/detokenize", body.encode()))
    assert answer[0] == status, answer


def test_the_limits_are_those_of_the_document():
    """What is too long is refused before any work is done for it, by the table in
    `docs/serving.md`.
    """
    table = (ROOT / "docs" / "serving.md").read_text()
    assert (
        "| a body | 16 MiB, within 30 s; 128 MiB of all bodies at one time |" in table
    )
    assert serving.LARGEST_BODIES == 128 * 2**20 and serving.BODY_SECONDS == 30.0
    assert "| headers of a request; connections | 10 s; 512 |" in table
    assert (port.HEADER_SECONDS, port.MOST_CONNECTIONS) == (10.0, 512)
    assert "a body of 4 MiB; 65,536 ids" in table
    assert (serving.LARGEST_TEXT, serving.MOST_IDS) == (2**22, 2**16)
    assert "commas, brackets and texts in the JSON of a body | 65,536, plus" in table
    assert "JSON of a body | 16,384 |" in table and MOST_NAMES == 2**14
    assert "4,096; 64 characters; 65,536 characters of JSON" in table
    limits = (MOST_MESSAGES, LONGEST_ROLE, LONGEST_OPTIONS)
    assert limits == (4096, 64, 65_536)


def test_ids_to_write_are_bounded(server, monkeypatch):
    monkeypatch.setattr(serving, "MOST_IDS", 10)
    status, message = told(server, "/detokenize", {"tokens": [1] * 11})
    assert status == 400 and "a list of at most 10 ids" in message


def test_what_a_client_wrote_is_not_echoed_in_full(server):
    long = "x" * 10**5
    for body in ({"model": long}, {long: 1}, {"stream_options": {long: 1}}):
        status, made = server.ask("/v1/completions", {"prompt": "a"} | body)
        assert status in (400, 404) and len(json.dumps(made)) < 600


@pytest.mark.parametrize(
    "field, value",
    {
        "chat_template_kwargs": {"a": "x" * 2**16},
        "messages": [{"role": "r" * 65, "content": "x"}],
    }.items(),
)
def test_what_a_template_gets_is_bounded(field, value, server):
    talk = {"messages": [{"role": "user", "content": "x"}], **GREEDY, field: value}
    status, message = told(server, "/v1/chat/completions", talk)
    assert status == 400 and "characters" in message


def test_a_large_body_is_read_outside_of_the_event_loop(monkeypatch):
    """By counters: what reads the body runs in the pool, and nothing else does."""
    app = App({"m": served(template=None)})
    in_pool, plain = [], app._in_pool

    async def counted(function, *values, **options):
        in_pool.append(function)
        return await plain(function, *values, **options)

    monkeypatch.setattr(app, "_in_pool", counted)
    small = json.dumps({"tokens": [1]}).encode()
    large = json.dumps({"tokens": [1] * 40_000}).encode()
    for body, count in ((small, 2), (large, 3)):
        in_pool.clear()
        assert asyncio.run(answered(app, "/detokenize", body))[0] == 200
        assert len(in_pool) == count


class Clock:
    """An event loop's timers, which run when a test says so."""

    def __init__(self):
        self.timers: list[SimpleNamespace] = []

    def call_later(self, seconds, function, *values):
        timer = SimpleNamespace(seconds=seconds, run=function, open=True)
        timer.cancel = lambda: setattr(timer, "open", False)
        self.timers.append(timer)
        return timer

    def open(self) -> list[float]:
        return [timer.seconds for timer in self.timers if timer.open]


class Transport:
    closed = False

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name):
        return None

    def write(self, data):
        pass

    def pause_reading(self):
        pass

    resume_reading = pause_reading


class Task:
    def add_done_callback(self, call):
        pass


class Tasks(Clock):
    """A loop whose tasks never run."""

    def create_task(self, work, **options):
        work.close()
        return Task()


def connection(others: int = 0):
    import uvicorn  # pyright: ignore[reportMissingImports]
    from uvicorn.server import ServerState  # pyright: ignore[reportMissingImports]

    async def app(scope, receive, send): ...

    config = uvicorn.Config(app, log_level="critical", lifespan="off")
    config.load()
    state = ServerState()
    state.connections |= {object() for _ in range(others)}  # pyright: ignore
    made = port._Connection(config, state, {}, _loop=Tasks())
    transport = Transport()
    made.connection_made(transport)  # pyright: ignore
    return made, made.loop, transport


def test_headers_that_do_not_come_close_the_connection():
    made, loop, transport = connection()
    assert loop.open() == [port.HEADER_SECONDS]
    made.data_received(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    assert loop.open() == [port.HEADER_SECONDS]
    loop.timers[0].run()
    assert transport.closed
    made.connection_lost(None)
    assert loop.open() == []


def test_a_request_that_has_come_is_not_timed():
    made, loop, transport = connection()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    made.data_received(head + b"1234")
    assert loop.open() == [] and made.cycle is not None
    made.data_received(b"56789")
    assert loop.open() == []
    # A further request of the same connection is.
    made.cycle.response_complete = True
    made.data_received(b"POST /tok")
    assert loop.open() == [port.HEADER_SECONDS]


def test_connections_are_bounded():
    assert not connection(others=port.MOST_CONNECTIONS - 1)[2].closed
    assert connection(others=port.MOST_CONNECTIONS)[2].closed


class Draining(Worker):
    """A worker whose open requests end one by one, and which SIGTERM then ends."""

    def __init__(self, requests: int):
        super().__init__(lambda: pytest.fail("no engine"), most_waiting=1)
        self.left, self.looks = requests, 0

    def start(self):
        self.polled = False

    @property  # pyright: ignore[reportIncompatibleVariableOverride]
    def broken(self):
        # The server looks here while it serves: its handlers are there by then.
        if not self.polled:
            self.polled = True
            os.kill(os.getpid(), signal.SIGTERM)

    @broken.setter
    def broken(self, why):
        assert why is None

    @property
    def open(self):
        assert self.draining, "new requests come in while the server ends"
        self.looks += 1
        self.left -= 1
        return self.left + 1

    def stop(self):
        self.stopped = True


@pytest.mark.parametrize("requests, grace, looks", [(3, 1e9, 4), (10**9, 0.0, 0)])
def test_a_signal_ends_a_server_when_its_requests_end_or_the_grace_does(
    requests, grace, looks, monkeypatch
):
    def unexpected(number, frame):
        raise AssertionError("the server has not taken the signal")

    monkeypatch.setattr(port, "_LOOK_SECONDS", 0.0)
    worker = Draining(requests)
    before = signal.signal(signal.SIGTERM, unexpected)
    try:
        with port.bind("127.0.0.1", 0) as bound:
            app = App({"m": served(template=None)})
            port.serve(app, [worker], bound, grace=grace)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert worker.stopped and worker.looks == looks


def test_a_worker_that_compiles_is_not_waited_for():
    import threading

    compiling, end = threading.Event(), threading.Event()

    def build():
        compiling.set()
        end.wait()
        raise UserError("ended")

    worker = Worker(build, most_waiting=1)
    worker.start()
    assert compiling.wait(timeout=60) and worker.compiles
    worker.stop()  # would wait a minute
    assert worker.compiles
    end.set()
    worker._thread.join(timeout=60)
    assert worker.broken == "ended" and not worker.compiles


def test_a_server_whose_engine_breaks_ends_with_the_reason():
    def build():
        raise UserError("no memory")

    worker = Worker(build, most_waiting=1)
    model = Served(name="m", worker=worker, tokenizer=ByteTokenizer(), template=None)
    raises = pytest.raises(UserError, match="the engine has stopped: no memory")
    with port.bind("127.0.0.1", 0) as bound, raises:
        port.serve(App({"m": model}), [worker], bound, grace=0.0)


@pytest.mark.parametrize("key", ["schlüssel", "two words", "a\x7f"])
def test_a_key_that_no_header_can_hold_is_refused(key, tmp_path):
    file = tmp_path / "key"
    file.write_text(key)
    with pytest.raises(UserError, match="must be ASCII without spaces"):
        command._read_key(file)
    file.write_text("s3cret\n")
    assert command._read_key(file) == "s3cret"


@pytest.mark.parametrize(
    "host, key, warned",
    [("0.0.0.0", False, 1), ("0.0.0.0", True, 0), ("::1", False, 0)],
)
def test_an_open_server_without_a_key_is_warned_of(
    host, key, warned, tmp_path, monkeypatch, capsys
):
    """`serve --host 0.0.0.0` without `--api-key-file` warns: whoever reaches the port
    may use the models.
    """
    options = ["runs/none", "--host", host]
    if key:
        (tmp_path / "key").write_text("abc")
        options += ["--api-key-file", str(tmp_path / "key")]
    worker = SimpleNamespace(compiles=False)
    monkeypatch.setattr(
        command,
        "_served",
        lambda name, *_: [SimpleNamespace(name=name, worker=worker, base=None)],
    )
    seen = {}
    monkeypatch.setattr(serving, "App", lambda models, **given: seen.update(given))
    name = SimpleNamespace(getsockname=lambda: (host, 1))
    monkeypatch.setattr(port, "bind", lambda *_: name)
    monkeypatch.setattr(port, "serve", lambda *_, **__: None)
    assert command.run([*options, "--allowed-host", "here"]) == 0
    said = capsys.readouterr().err
    assert said.count("without --api-key-file") == warned
    assert {"here", host, *LOOPBACK} == set(seen["hosts"])
    assert seen["addresses"] == (host == "0.0.0.0")
    assert ServeOptions(runs=()).allowed_host == ()


def test_more_ends_of_a_text_than_an_engine_takes_are_refused(tmp_path, monkeypatch):
    loaded = SimpleNamespace(tokenizer=ByteTokenizer())
    monkeypatch.setattr(command, "load_run", lambda *_, **__: loaded)
    monkeypatch.setattr(command, "text_ends", lambda _: tuple(range(9)))
    with pytest.raises(UserError, match="names 9 tokens and an engine takes 8: re"):
        command._served("m", tmp_path, ServeOptions(runs=()))
