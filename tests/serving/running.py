"""A server in a thread, and a client of it."""

import http.client
import json
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace

from recurjax.data.chat import ChatTemplate
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.inference.engine import EngineConfig
from recurjax.inference.engine.memory import StateSize
from recurjax.serving import server as serving
from recurjax.serving.app import App, Served
from recurjax.serving.worker import Worker

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = EngineConfig(
    slots=2, length=48, prefill_tokens=16, steps=4, states_gib=1e-3, top_logprobs=2
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
GREEDY = {"temperature": 0, "max_tokens": 6}


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self, worker: Worker, port: int):
        self.worker, self.port = worker, port

    def ask(self, path: str, body=None, *, data: bytes | None = None, headers=None):
        """Returns the status, and the JSON or the text."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        if body is not None:
            data = json.dumps(body).encode()
        kind = {} if data is None else {"content-type": "application/json"}
        method = "GET" if data is None else "POST"
        link.request(method, path, data, kind | (headers or {}))
        answer = link.getresponse()
        text = answer.read().decode()
        link.close()
        as_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if as_json else text

    def events(self, path: str, body) -> list:
        status, text = self.ask(path, body | {"stream": True})
        assert status == 200
        lines = [line for line in text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    def wait(self) -> None:
        """Waits until it takes requests."""
        for _ in range(2400):  # two minutes: a machine may be busy
            if self.ask("/health")[0] == 200:
                return
            time.sleep(0.05)

    def idle(self) -> bool:
        """Waits until no slot is taken."""
        for _ in range(2400):
            engine = self.worker.engine
            if self.worker.open == 0 and not engine.busy:
                return True
            time.sleep(0.05)
        return False


@contextmanager
def running(
    build,
    *,
    waiting=4,
    api_key=None,
    template=TEMPLATE,
    scorer=None,
    ends=(),
    names=("abc",),
    adapters=(),
):
    worker = Worker(build, most_waiting=waiting, build_scorer=lambda: scorer)
    template = None if template is None else ChatTemplate(template)
    model = Served(
        name="abc",
        worker=worker,
        tokenizer=ByteTokenizer(),
        template=template,
        ends=ends,
        sizes=[StateSize(1, 100, 400), StateSize(48, 4800, 19200)],
    )
    bound = serving.bind("127.0.0.1", 0)
    models = dict.fromkeys(names, model)
    for number, adapter in enumerate(adapters, start=1):
        name = f"abc:{adapter}"
        models[name] = replace(model, name=name, base="abc", adapter=number)
    app = App(models, api_key=api_key)
    ended = threading.Event()
    thread = threading.Thread(
        target=serving.serve,
        args=(app, [worker], bound),
        kwargs={"grace": 5.0, "ends": ended},
        daemon=True,
    )
    thread.start()
    try:
        yield Running(worker, bound.getsockname()[1])
    finally:
        ended.set()
        thread.join(timeout=60)
        if thread.is_alive():
            stacks = [traceback.format_stack(f) for f in sys._current_frames().values()]
            message = "\n".join("".join(stack) for stack in stacks)
            raise AssertionError(f"the server has not ended in 60 s:\n{message}")


def told(server, path: str, body) -> tuple[int, str]:
    sent = {"data": body} if isinstance(body, bytes) else {"body": body}
    status, answer = server.ask(path, **sent)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]["message"]
