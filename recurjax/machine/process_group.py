"""The processes of one program end together: an error of one reaches all of them.

A process that waits for the others in a collective waits inside native code, where no
Python exception can reach it. So each process has a thread that waits for a message on
jax's coordination service, through which the processes found each other. A process that
fails alone leaves a message there. The threads of the others print it, let what is
being written be finished, and exit with 2.

A process that is killed leaves no message. jax's service then misses its heartbeats and
aborts the others with a message of its own, which says which process is gone.

With one process nothing of this is started.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from recurjax.errors import UserError
from recurjax.machine import early_interrupt

HEARTBEAT_SECONDS = 10
"""After this long without a sign of life a process counts as lost; jax's default of 100
seconds keeps an entire pod waiting."""

_ACTION_SECONDS = 8.0
_EXIT_SECONDS = 1.0
"""What the other processes have to exit after their last message."""
_VERDICT_SECONDS = HEARTBEAT_SECONDS + 15.0
"""For how long an error that a lost process can have caused is held back: until that
process' message is here, or jax's service has missed its heartbeats."""


class SharedError(UserError):
    """An error that every process raises at the same point: it needs no message."""


def watch() -> None:
    """Starts listening for the other processes; once, after they have joined."""
    from jax._src import distributed  # jax offers its client nowhere else

    global _group
    state = distributed.global_state
    if _group is None and state.client is not None and state.num_processes > 1:
        early_interrupt.work_begins()  # the others must learn of an interruption
        _group = _Group(state.client, state.process_id, state.num_processes)


@contextmanager
def on_abort(action: Callable[[], object]) -> Iterator[None]:
    """Runs `action` if an error of any process ends this one while the block runs.

    It runs in a thread, while others still run, and must need no other process of the
    run but what a save in the background needs.
    """
    _actions.append(action)
    try:
        yield
    finally:
        if action in _actions:  # else it has run
            _actions.remove(action)


def barrier(*, seconds: float) -> None:
    """Waits until every process has called it as often as this one; in any thread.

    It uses the coordination service and no device, so it may run during a step.

    Raises:
      TimeoutError: some process has not come within this time.
    """
    if _group is not None:
        _group.barrier(seconds)


def leave(error: BaseException) -> bool:
    """Sends the others the error that ends this process, if they do not have it too.

    Returns:
      Whether a message was sent: from here on nothing may wait for the others, and the
      process has to end with `end`. False for one process, and for errors that all of
      them have at the same time.
    """
    if _group is None or isinstance(error, SharedError):
        return False
    return _group.leave(error)


def is_leaving() -> bool:
    """Whether this process has sent the others the error that ends it."""
    return _group is not None and _group.leaving


def end(code: int) -> None:
    """Ends this process if it is leaving; otherwise does nothing.

    jax's own exit would wait for the other processes.
    """
    if _group is not None and _group.leaving:
        _group.end(code)


_group: "_Group | None" = None
_actions: list[Callable[[], object]] = []
_acting = threading.Lock()


class _Group:
    """This process' connection to the others."""

    def __init__(self, client: Any, rank: int, count: int):
        self.leaving = False
        self._barriers = 0
        self._client, self._rank, self._count = client, rank, count
        self._speaking = threading.Lock()  # taken once: one sentence per process
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        # Registered after jax's own exit handler, so it runs before that.
        atexit.register(self._close)

    def leave(self, error: BaseException) -> bool:
        if self.leaving:
            return True
        if _may_come_from_a_peer(error):
            # Then the peer's own sentence says more: the thread that receives it ends
            # this process, or jax's service aborts it, which runs nothing of ours.
            _run_actions()
            self._thread.join(_VERDICT_SECONDS)
            time.sleep(1)
        if not self._speaking.acquire(blocking=False):
            time.sleep(_VERDICT_SECONDS)  # the thread is speaking and about to end us
        self.leaving = True
        message = json.dumps({"process": self._rank, "sentence": _sentence(error)})
        for rank in range(self._count):
            if rank != self._rank:
                with suppress(Exception):  # the service may be what is gone
                    self._set(_message_key(rank), message)
        _run_actions()
        return True

    def barrier(self, seconds: float) -> None:
        self._barriers += 1  # a barrier of the service can be passed once
        name = f"recurjax/barrier/{self._barriers}"
        try:
            self._client.wait_at_barrier(name, int(1000 * seconds))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(f"waited {seconds:.0f} s for the others") from error
            raise

    def end(self, code: int) -> None:
        """Process 0 holds the service: it exits last, once all have the message."""
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(Exception):
            self._set(_left_key(self._rank), "")
            if self._rank == 0:
                for rank in range(self._count):
                    limit = int(1000 * (_ACTION_SECONDS + 2))
                    self._client.blocking_key_value_get(_left_key(rank), limit)
                # Without the service jax aborts a process that has yet to exit.
                time.sleep(_EXIT_SECONDS)
        os._exit(code)

    def _listen(self) -> None:
        while True:
            try:
                # The client has no wait without a limit.
                text = self._client.blocking_key_value_get(
                    _message_key(self._rank), 60_000
                )
                break
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # the service is gone: jax aborts
        # `_close` sends this process an empty message to end this thread.
        if not text or not self._speaking.acquire(blocking=False):
            return
        message = json.loads(text)
        sys.stdout.flush()
        print(
            f"recurjax: process {message['process']} ended the run: "
            f"{message['sentence']}",
            file=sys.stderr,
            flush=True,
        )
        _run_actions()
        self.end(2)

    def _close(self) -> None:
        """Ends the listening thread at the end of the interpreter."""
        if self.leaving:
            self.end(1)
        with suppress(Exception):
            self._set(_message_key(self._rank), "")
            self._thread.join(10)

    def _set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)


def _message_key(rank: int) -> str:
    """Each process has a key of its own, so that a late reader misses nothing."""
    return f"recurjax/message/{rank}"


def _left_key(rank: int) -> str:
    return f"recurjax/left/{rank}"


def _sentence(error: BaseException) -> str:
    if isinstance(error, UserError | OSError):
        return str(error)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        # Python's message for these is empty or a bare number.
        return "it was stopped"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _may_come_from_a_peer(error: BaseException | None) -> bool:
    """Whether a process that has gone can be the cause of an error in this one."""
    # The messages of a broken connection look alike, whoever broke it.
    words = ("gloo", "nccl", "by peer", "socket closed", "barrier", "unavailable:")
    words += ("deadline_exceeded", "coordination", "heartbeat", "cancelled:")
    # A collective's failure is often wrapped in an error of the program around it.
    while error is not None:
        text = str(error).lower()
        if any(word in text for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _run_actions() -> None:
    """Runs each action once, the latest first, and waits for none of them long."""

    def act(action: Callable[[], object]) -> None:
        with suppress(Exception):  # nothing may hide the sentence of the error
            action()

    with _acting:
        limit = time.monotonic() + _ACTION_SECONDS
        while _actions:
            thread = threading.Thread(target=act, args=(_actions.pop(),), daemon=True)
            thread.start()
            thread.join(max(0.5, limit - time.monotonic()))
