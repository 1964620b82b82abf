"""One request's answer on its way to the client, who may go away at any time."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

from starlette.responses import (  # pyright: ignore[reportMissingImports]
    JSONResponse,
    Response,
)

from recurjax.serving.answers import Answers, Choice
from recurjax.serving.errors import RequestError
from recurjax.serving.metrics import Metrics
from recurjax.serving.worker import News, Worker


class RequestStream:
    """The choices of one request, and what they bring."""

    def __init__(
        self, worker: Worker, choices: list[Choice], metrics: Metrics, name: str
    ):
        self.worker, self.choices = worker, choices
        self._metrics, self._name = metrics, name

    async def news(self) -> AsyncIterator[list[tuple[Choice, News]]]:
        """Yields the choices' news, all that are there at once, until all have ended.

        Raises:
          RequestError: 500, where one failed.
        """
        choices = {choice.stream: choice for choice in self.choices}
        going = len(choices)
        while going:
            # All choices share one queue: the slowest holds up no other.
            batch = [
                (choices[stream], news)
                for stream, news in await self.worker.next(self.choices[0].stream)
            ]
            batch.sort(key=lambda pair: pair[0].index)  # clients see choices by number
            for choice, news in batch:
                if news.reason in ("not_finite", "failed"):
                    raise RequestError(500, _FAILED[news.reason])
                if news.reason is not None:
                    self._metrics.ended(self._name, choice.stream)
                    going -= 1
                choice.take(news)
            yield batch

    def cancel(self) -> None:
        for choice in self.choices:
            self.worker.cancel(choice.stream)


_FAILED = {
    "not_finite": "the model's logits are not finite: its parameters or activations "
    "hold NaN or infinities",
    "failed": "the engine has stopped",
}


class WholeAnswer:
    """Answers in one piece, unless the client goes away first."""

    def __init__(self, talk: RequestStream, answers: Answers):
        self._talk, self._answers = talk, answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = await _unless_gone(self._make(), receive, self._talk)
        if response is not None:
            await response(scope, receive, send)

    async def _make(self) -> Response:
        try:
            async for _ in self._talk.news():
                pass
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)
        # Probabilities of many tokens take long to write.
        return await asyncio.to_thread(self._response)

    def _response(self) -> Response:
        return JSONResponse(self._answers.response(self._talk.choices))


class Events:
    """Answers as server-sent events, each a piece of one choice."""

    def __init__(self, talk: RequestStream, answers: Answers):
        self._talk, self._answers = talk, answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await _unless_gone(self._send(send), receive, self._talk)

    async def _send(self, send: Any) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        # The status goes out before the first token; later failures are events.
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(start)

        async def events(pieces: Iterable[Any], *, more: bool = True) -> None:
            # What is there at once goes out at once: a send is a system call.
            body = "".join(f"data: {_text(piece)}\n\n" for piece in pieces).encode()
            if body or not more:
                part = {"type": "http.response.body", "body": body, "more_body": more}
                await send(part)

        try:
            await events(self._answers.begins(self._talk.choices))
            async for batch in self._talk.news():
                await events(
                    piece
                    for choice, news in batch
                    for piece in self._answers.pieces(choice, news)
                )
            ends = self._answers.ends(self._talk.choices)
            # OpenAI's own end of a stream, which its clients wait for.
            await events([*ends, "[DONE]"], more=False)
        except RequestError as error:
            await events([error.body()], more=False)


def _text(piece: Any) -> str:
    return piece if isinstance(piece, str) else json.dumps(piece)


async def _unless_gone(work: Any, receive: Any, talk: RequestStream) -> Any:
    """Runs work until it ends or the client has gone; then its slots are free."""

    async def gone() -> None:
        # What is left of the body comes first; a disconnect may come at any time.
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            with suppress(OSError):  # the client went while it was sent to
                return tasks[0].result()
        return None
    finally:
        # Does nothing to choices that have ended.
        talk.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
