"""An engine in a thread of its own: the event loop never waits for the device."""

import asyncio
import gc
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from recurjax.inference.engine import Engine, Request, RequestSettings
from recurjax.serving.errors import RequestError
from recurjax.serving.prompt_scores import PromptScorer, PromptScores


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """New output of a request since the last report.

    Attributes:
      text: its next piece.
      tokens, logprobs, top: the new ones; see `Request`.
      exits: the pieces of text of the new tokens and the loops that made them, where
        tokens leave early.
      reason: why it ended, None while it continues.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    exits: list[tuple[str, int]]
    reason: str | None


class AnswerStream:
    """A request as the event loop sees it.

    Attributes:
      scores: scores of the prompt, if requested; available before the first news.
      continues: whether the model continues the prompt, or only scores it.
      news: news of this stream and of those that were submitted with it.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        settings: RequestSettings,
        news: "asyncio.Queue[tuple[AnswerStream, News]]",
        *,
        scored: bool = False,
        continues: bool = True,
    ):
        self.prompt, self.settings, self.scored = prompt, settings, scored
        self.continues = continues
        self.scores: PromptScores | None = None
        self.news = news
        # Bound to the caller's event loop, to which the thread passes news.
        self.loop = asyncio.get_running_loop()
        self.open = True
        # These two are the engine's thread's.
        self.request: Request | None = None
        self.sent: tuple[int, int] = 0, 0


class Worker:
    """Runs an engine; requests go in and news come out by queues.

    Attributes:
      engine: None until it is compiled.
      scorer: scorer of prompts; None: no prompts are scored.
      broken: why it stopped for good, None while it works.
      draining: takes nothing more, and ends what it has.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        most_waiting: int,
        build_scorer: Callable[[], PromptScorer | None] = lambda: None,
    ):
        """Prepares it.

        Args:
          build: makes the engine, in the thread.
          most_waiting: requests beyond the slots that may wait.
          build_scorer: makes what scores prompts, likewise.
        """
        self.engine: Engine | None = None
        self.scorer: PromptScorer | None = None
        self._build_scorer = build_scorer
        self.broken: str | None = None
        self.draining = False
        self._build, self._most_waiting = build, most_waiting
        # A queue without locks of the loop's: the thread blocks on it while idle.
        self._inbox: queue.SimpleQueue[tuple[str, AnswerStream | None]] = (
            queue.SimpleQueue()
        )
        self._streams: set[AnswerStream] = set()  # the event loop's
        self._running: dict[Request, AnswerStream] = {}  # the thread's
        self._scoring: deque[tuple[AnswerStream, Iterator[PromptScores | None]]] = (
            deque()
        )
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")

    @property
    def open(self) -> int:
        """How many requests have not ended."""
        return len(self._streams)

    def start(self) -> None:
        """Starts the thread, which first compiles."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what runs is dropped, and nothing waits for a compiler."""
        self._inbox.put(("stop", None))
        if not self.compiles:
            self._thread.join(timeout=60)

    @property
    def compiles(self) -> bool:
        """Whether the thread is making its engine."""
        return self._thread.is_alive() and self.engine is None and self.broken is None

    def ready(self) -> Engine:
        """Returns the engine where it takes requests.

        Raises:
          RequestError: 503.
        """
        if self.broken is not None:
            raise RequestError(503, f"the engine has stopped: {self.broken}")
        if self.engine is None:
            raise RequestError(503, "the model is being compiled: try again soon")
        if self.draining:
            raise RequestError(
                503, "the server is shutting down and accepts no more requests"
            )
        return self.engine

    @property
    def most_texts(self) -> int:
        """The texts that run and wait at most; raises like `ready`."""
        return self.ready().slots + self._most_waiting

    def submit(
        self,
        requests: list[tuple[np.ndarray, RequestSettings]],
        *,
        scored: bool = False,
        continues: bool = True,
    ) -> list[AnswerStream]:
        """Submits requests, all of them or none.

        Args:
          scored: whether their prompts are scored.
          continues: whether the model continues them.

        Raises:
          RequestError: 503; 429 where too many wait already; 400 where they are more
            than could ever wait.
          UserError: the engine refuses one.
        """
        engine = self.ready()
        for prompt, settings in requests:
            # All are checked before any is taken: no half of a request runs.
            engine.check(prompt, settings)
        self.check_count(len(requests))
        most = self.most_texts
        if self.open + len(requests) > most:
            raise RequestError(
                429,
                f"{self.open} requests are open and the server takes {most}: try "
                "again later",
            )
        news: asyncio.Queue[tuple[AnswerStream, News]] = asyncio.Queue()
        streams = [
            AnswerStream(*request, news, scored=scored, continues=continues)
            for request in requests
        ]
        for stream in streams:
            self._streams.add(stream)
            self._inbox.put(("submit", stream))
        return streams

    def check_count(self, texts: int) -> None:
        """Rejects more texts than the queue can hold, before any work.

        Raises:
          RequestError: 400, and no 429, on which clients ask the same again; 503.
        """
        if texts > (most := self.most_texts):
            raise RequestError(
                400,
                f"a request asks for {texts} texts (prompts times n) and this "
                f"server takes {most} at once: send fewer, or start it with a "
                "larger --queue",
            )

    def cancel(self, stream: AnswerStream) -> None:
        """Ends a request; nothing where it has ended."""
        if stream.open:
            # Closed at once, so that its place counts as free before the thread acts.
            self._close(stream)
            self._inbox.put(("cancel", stream))

    async def next(self, stream: AnswerStream) -> list[tuple[AnswerStream, News]]:
        """Waits for news of a stream or of those submitted with it; returns all."""
        batch = [await stream.news.get()]
        while not stream.news.empty():
            batch.append(stream.news.get_nowait())
        # The last news carries the reason; nothing comes after it.
        for sender, news in batch:
            if news.reason is not None:
                self._close(sender)
        return batch

    def _close(self, stream: AnswerStream) -> None:
        stream.open = False
        self._streams.discard(stream)

    def _run(self) -> None:
        try:
            # Compiles for seconds to minutes; until then `ready` answers 503.
            engine = self._build()
            self.scorer = self._build_scorer()
            # A full collection of garbage takes as long as many decode calls, and large
            # bodies set it off: it need not walk over the imported modules again.
            gc.collect()
            gc.freeze()
            self.engine = engine
            while self._serve(engine):
                pass
        except Exception as error:  # every client gets the error; the server continues
            self.broken = str(error).partition("\n")[0][:300] or type(error).__name__
            # Those not yet submitted wait for news too and would wait for ever.
            waiting: list[AnswerStream | None] = []
            while not self._inbox.empty():
                waiting.append(self._inbox.get()[1])
            waiting += [stream for stream, _ in self._scoring]
            failed = {*self._running.values(), *filter(None, waiting)}
            self._tell([(stream, _ended("failed")) for stream in failed])

    def _serve(self, engine: Engine) -> bool:
        """Runs one step, or waits for work; returns False to stop."""
        # Take all new requests before the next step; an idle engine blocks in get()
        # instead of spinning.
        while not ((engine.busy or self._scoring) and self._inbox.empty()):
            act, stream = self._inbox.get()
            if stream is None:
                return False
            if act == "submit" and stream.scored and self.scorer is not None:
                adapter = stream.settings.adapter
                pieces = self.scorer.score(stream.prompt, adapter=adapter)
                self._scoring.append((stream, pieces))
            elif act == "submit":
                self._submit(engine, stream)
            # Messages keep their order: it was submitted before.
            elif stream.request is not None:
                engine.cancel(stream.request)
                self._running.pop(stream.request, None)
            else:
                others = [item for item in self._scoring if item[0] is not stream]
                self._scoring = deque(others)
        self._score(engine)
        self._tell([*filter(None, map(self._news, engine.step()))])
        return True

    def _submit(self, engine: Engine, stream: AnswerStream) -> None:
        if not stream.continues:
            self._tell([(stream, _ended("length"))])
            return
        stream.request = engine.submit(stream.prompt, stream.settings)
        self._running[stream.request] = stream

    def _score(self, engine: Engine) -> None:
        """Scores a piece of one prompt; a complete one goes to the engine."""
        if self._scoring:
            stream, pieces = self._scoring[0]
            stream.scores = next(pieces)
            if stream.scores is not None:
                self._scoring.popleft()
                self._submit(engine, stream)

    def _news(self, request: Request) -> tuple[AnswerStream, News] | None:
        stream = self._running.get(request)
        if stream is None:
            return None
        # Requests only grow: the news is whatever follows the last report.
        tokens, text = stream.sent
        news = News(
            text=request.text[text:],
            tokens=request.tokens[tokens:],
            logprobs=request.logprobs[tokens:],
            top=request.top[tokens:],
            exits=list(
                zip(request.pieces[tokens:], request.loops[tokens:], strict=True)
            ),
            reason=request.reason,
        )
        stream.sent = len(request.tokens), len(request.text)
        if request.done:
            del self._running[request]
        return stream, news

    def _tell(self, news: list[tuple[AnswerStream, News]]) -> None:
        """Hands news over to the event loop, all of a step at once."""
        # To wake it takes a system call, and the interpreter from this thread.
        for loop in {stream.loop for stream, _ in news}:
            here = [item for item in news if item[0].loop is loop]
            try:
                loop.call_soon_threadsafe(_put, here)
            except RuntimeError:  # it was closed: nobody listens any more
                for stream, _ in here:
                    self._running.pop(stream.request, None)  # pyright: ignore


def _put(batch: list[tuple[AnswerStream, News]]) -> None:
    for stream, news in batch:
        stream.news.put_nowait((stream, news))


def _ended(reason: str) -> News:
    return News(text="", tokens=[], logprobs=[], top=[], exits=[], reason=reason)
