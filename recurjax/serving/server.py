"""A port, the routes on it, and an orderly end."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence

import uvicorn  # pyright: ignore[reportMissingImports]

from recurjax.errors import UserError
from recurjax.serving.app import App
from recurjax.serving.worker import Worker

_LOOK_SECONDS = 0.05


def bind(host: str, port: int) -> socket.socket:
    """Takes a port, before anything dear is done; 0: any that is free.

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
            f"cannot listen on {host} port {port}: {reason}; name another with --port"
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
    """
    for worker in workers:
        worker.start()
    try:
        asyncio.run(_serve(app, workers, bound, grace, ends))
    finally:
        for worker in workers:
            worker.stop()


async def _serve(
    app: App,
    workers: Sequence[Worker],
    bound: socket.socket,
    grace: float,
    ends: threading.Event | None,
) -> None:
    # Sockets are passed in already bound; the lifespan protocol has no use here.
    config = uvicorn.Config(
        app.asgi, log_level="warning", lifespan="off", timeout_graceful_shutdown=5
    )
    server, ending = _Server(config), threading.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Signals come to the main thread; elsewhere `ends` ends the server.
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(number, ending.set)

    async def end() -> None:
        while not (ending.is_set() or (ends is not None and ends.is_set())):
            # Polled: a signal and an event of another thread, with one wait for both.
            await asyncio.sleep(_LOOK_SECONDS)
        for worker in workers:
            # New requests get 503 from here on; open ones go on to their end.
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


class _Server(uvicorn.Server):
    """uvicorn's, with signals left alone: it would pass them on when it has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `_serve`."""
        yield
