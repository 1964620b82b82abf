"""A port, the routes on it, and an orderly end."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn  # pyright: ignore[reportMissingImports]
from uvicorn.protocols.http.h11_impl import (  # pyright: ignore[reportMissingImports]
    H11Protocol,
)

from recurjax.errors import UserError
from recurjax.serving.app import App
from recurjax.serving.worker import Worker

_LOOK_SECONDS = 0.05
HEADER_SECONDS = 10.0
"""The headers of a request must have come within this time."""
MOST_CONNECTIONS = 512


def bind(host: str, port: int) -> socket.socket:
    """Binds a port before any costly work starts; 0: any free port.

    Raises:
      UserError: it is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server started again at once finds its port free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        # Only a socket that listens keeps others from the port.
        bound.listen()
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host} port {port}: {reason}; choose another "
            "port with --port"
        ) from error
    return bound


def serve(
    app: App,
    workers: Sequence[Worker],
    bound: socket.socket,
    *,
    grace: float,
    ends: threading.Event | None = None,
) -> None:
    """Answers until SIGTERM or SIGINT; then takes nothing more, and ends what it has.

    Args:
      grace: seconds that open requests have for their end.
      ends: ends it too, for a server that is not in the main thread.

    Raises:
      UserError: the engines have stopped by an error; whoever started this process may
        start it again.
    """
    for worker in workers:
        worker.start()
    try:
        asyncio.run(_serve(app, workers, bound, grace, ends))
    finally:
        for worker in workers:
            worker.stop()
    broken = [worker.broken for worker in workers if worker.broken is not None]
    if broken:
        raise UserError(f"the engine has stopped: {broken[0]}")


async def _serve(
    app: App,
    workers: Sequence[Worker],
    bound: socket.socket,
    grace: float,
    ends: threading.Event | None,
) -> None:
    # Sockets are passed in already bound; the lifespan protocol has no use here.
    config = uvicorn.Config(
        app.asgi,
        http=_Connection,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    server, ending = _Server(config), threading.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Signals come to the main thread; elsewhere `ends` ends the server.
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(number, ending.set)

    async def end() -> None:
        while not (
            ending.is_set()
            or (ends is not None and ends.is_set())
            or all(worker.broken is not None for worker in workers)
        ):
            # Polled: a signal and an event of another thread, with one wait for both.
            await asyncio.sleep(_LOOK_SECONDS)
        for worker in workers:
            # New requests get 503 from here on; open ones continue to their end.
            worker.draining = True
        until = loop.time() + grace
        while loop.time() < until and any(worker.open for worker in workers):
            await asyncio.sleep(_LOOK_SECONDS)
        server.should_exit = True

    ender = asyncio.ensure_future(end())
    try:
        await server.serve(sockets=[bound])
    finally:
        ender.cancel()


class _Connection(H11Protocol):
    """uvicorn's connection, which waits for a request's headers for a limited time.

    More than `MOST_CONNECTIONS` at one time are closed as they come.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # pyright: ignore
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.close()
        else:
            self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._deadline is None and (before is None or before.response_complete):
            self._wait_for_headers()  # of a further request of the same connection
        super().data_received(data)
        # A cycle begins when the headers of its request are all there.
        if self.cycle is not before:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would re-raise signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `_serve`."""
        yield
