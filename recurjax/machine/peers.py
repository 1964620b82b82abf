"""The processes of one program end together: an error of one reaches all of them.

A process that waits for the others in a collective waits inside native code, where no
Python exception can reach it. So each process has a thread that waits for news on jax's
coordination service, through which the processes found each other. Who fails alone
tells the others there; their threads say the sentence, let what is being written be
finished, and end their process. A process that vanishes can tell nobody: then the
service misses its heartbeats, and jax ends every process with a native stack trace, of
which one sentence is made here.

With one process nothing of this is started.
"""

import atexit
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from recurjax.errors import UserError

HEARTBEAT_SECONDS = 10
"""So long after its last sign of life a process counts as lost; jax's own 100 seconds
keep a whole pod waiting."""

_LAST_WORDS_SECONDS = 8.0
_NEWS_SECONDS = 25.0
"""For how long an error that a lost process can have caused is held back: until the
heartbeats are missed and the service has told everybody."""


class SharedError(UserError):
    """An error that every process raises at the same point: nobody has to be told."""


def watch() -> None:
    """Starts listening for the other processes; once, after they have joined."""
    from jax._src import distributed  # jax offers its client nowhere else

    global _peers
    state = distributed.global_state
    if _peers is None and state.client is not None and state.num_processes > 1:
        _peers = _Peers(state.client, state.process_id, state.num_processes)


@contextmanager
def last_words(action: Callable[[], object]) -> Iterator[None]:
    """While the block runs, `action` is done should another process end this one.

    It runs in a thread, while others still run, and must need no other process of the
    run but what a save in the background needs.
    """
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def meet(*, seconds: float) -> None:
    """Waits until every process has called it as often as this one; in any thread.

    It asks the coordination service and no device, so it may run beside a step.

    Raises:
      TimeoutError: some process has not come within this time.
    """
    if _peers is not None:
        _peers.meet(seconds)


def leave(error: BaseException) -> bool:
    """Tells the others that this process ends by an error of its own, if it does.

    Returns:
      True when they were told: nothing may be waited for any more that needs them, and
      the process has to end with `end`. False for one process, and for errors that all
      of them have at the same time.
    """
    if _peers is None or isinstance(error, SharedError):
        return False
    return _peers.leave(error)


def are_told() -> bool:
    """Whether this process has told the others that it ends."""
    return _peers is not None and _peers.leaving


def end(code: int) -> None:
    """Ends this process if it has told the others that it does; else does nothing.

    jax's own way out would wait for them at the door.
    """
    if _peers is not None and _peers.leaving:
        _peers.end(code)


_peers: "_Peers | None" = None
_actions: list[Callable[[], object]] = []


class _Peers:
    """This process' place among the others."""

    def __init__(self, client: Any, rank: int, count: int):
        self.leaving = False
        self._meetings = 0
        self._client, self._rank, self._count = client, rank, count
        self._speaking = threading.Lock()  # taken once: one sentence a process
        self._errors = _NativeErrors()
        self._on_abort = _set_abort_handler(self._aborted)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        # Registered after jax's own, so it runs before that.
        atexit.register(self._close)

    def leave(self, error: BaseException) -> bool:
        if self.leaving:
            return True
        # The messages of a broken connection look alike, whoever broke it.
        if _may_be_of_another(error):
            # Another's end may have made this error. Then its sentence is better than
            # ours, and the thread that has it ends the process meanwhile.
            self._thread.join(_NEWS_SECONDS)
            time.sleep(1)
        if not self._speaking.acquire(blocking=False):
            time.sleep(_NEWS_SECONDS)  # a thread is speaking and about to end us
        self.leaving = True
        news = json.dumps({"process": self._rank, "sentence": _sentence(error)})
        for rank in range(self._count):
            # Each process has a key of its own, so that a late reader misses nothing.
            if rank != self._rank:
                with suppress(Exception):  # the service may be what is gone
                    self._client.key_value_set(_news(rank), news, allow_overwrite=True)
        _say_last_words()
        return True

    def meet(self, seconds: float) -> None:
        # A barrier of the service can be passed once.
        self._meetings += 1
        barrier = f"recurjax/meeting/{self._meetings}"
        try:
            self._client.wait_at_barrier(barrier, int(1000 * seconds))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(f"waited {seconds:.0f} s for the others") from error
            raise

    def end(self, code: int) -> None:
        """Process 0 holds the service: it goes last, once all have read the news."""
        sys.stdout.flush()
        sys.stderr.flush()
        # Without this an answer that is still in the buffers is lost at `_exit`.
        with suppress(Exception):
            self._client.key_value_set(_left(self._rank), "", allow_overwrite=True)
            if self._rank == 0:
                for rank in range(self._count):
                    limit = int(1000 * (_LAST_WORDS_SECONDS + 2))
                    self._client.blocking_key_value_get(_left(rank), limit)
        self._errors.close()
        os._exit(code)

    def _listen(self) -> None:
        while True:
            try:
                # A wait of a minute, again and again: the client offers none without an
                # end.
                text = self._client.blocking_key_value_get(_news(self._rank), 60_000)
                break
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # the service is gone: jax aborts
        # Empty news is what `_close` sends itself to end this thread.
        if not text or not self._speaking.acquire(blocking=False):
            return
        news = json.loads(text)
        _print(f"process {news['process']} ended the run: {news['sentence']}")
        _say_last_words()
        self.end(2)

    def _aborted(self) -> None:
        """What happens in place of the abort by which native code ends the process."""
        said = self._errors.fatal()
        # An abort that has nothing to do with the service keeps its own message and its
        # core dump.
        if "JAX distributed service detected fatal errors" not in said:
            self._errors.forward()
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.abort()
        if self._speaking.acquire(blocking=False):
            _print(
                f"{_who(said)} was lost: it was killed or its machine is gone; start "
                "all processes again and the run goes on from its last checkpoint"
            )
            _say_last_words(seconds=1)  # what was being saved cannot become whole
        elif self.leaving:  # it has its own sentence, which the main thread says
            time.sleep(_LAST_WORDS_SECONDS)
        sys.stdout.flush()
        os._exit(2)

    def _close(self) -> None:
        """Ends the listening thread at the end of the interpreter."""
        if self.leaving:
            self.end(1)
        with suppress(Exception):
            self._client.key_value_set(_news(self._rank), "", allow_overwrite=True)
            self._thread.join(10)
        self._errors.close()


def _news(rank: int) -> str:
    return f"recurjax/news/{rank}"


def _left(rank: int) -> str:
    return f"recurjax/left/{rank}"


def _print(sentence: str) -> None:
    sys.stdout.flush()
    print(f"recurjax: {sentence}", file=sys.stderr, flush=True)


def _sentence(error: BaseException) -> str:
    if isinstance(error, UserError | OSError):
        return str(error)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        # Python's message for these is empty or a bare number.
        return "it was stopped"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _may_be_of_another(error: BaseException | None) -> bool:
    """Whether a process that has gone can be the cause of an error in this one."""
    words = ("gloo", "nccl", "by peer", "socket closed", "barrier", "unavailable:")
    words += ("deadline_exceeded", "coordination", "heartbeat", "cancelled:")
    while error is not None:
        text = str(error).lower()
        if any(word in text for word in words):
            return True
        error = error.__cause__ or error.__context__
    # A collective's failure is often wrapped in an error of the program around it.
    return False


def _who(said: str) -> str:
    """Reads from jax's message which processes it misses."""
    found = re.search(r"stopped sending heartbeats\):\s*((?:\d+\s+)+)", said)
    if found:
        lost = found[1].split()
        return f"process {lost[0]}" + (
            f" (and {len(lost) - 1} more)" * (lost[1:] != [])
        )
    return "process 0" if "Failed to send RPC" in said else "another process"


def _say_last_words(seconds: float = _LAST_WORDS_SECONDS) -> None:
    """Does what is left to do, the latest first, and waits for none of it for long."""
    limit = time.monotonic() + seconds

    def act(action: Callable[[], object]) -> None:
        with suppress(Exception):  # the sentence is said: nothing may hide it
            action()

    for action in reversed(list(_actions)):
        thread = threading.Thread(target=act, args=(action,), daemon=True)
        thread.start()
        thread.join(max(0.5, limit - time.monotonic()))


def _set_abort_handler(action: Callable[[], None]) -> Any:
    """Has `action` run in place of an abort; it must end the process.

    A handler of Python's own only notes the signal, and abort() does not wait for that.

    Returns:
      What has to be kept for as long as the handler may be called.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda _: action())
    # ctypes would pass a function of this kind as an object without these types.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, kind], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), handler)
    return handler


class _NativeErrors:
    """Standard error of native code, passed on line by line.

    What jax's coordination service says of lost processes, and the stack trace after
    it, is held back: `fatal` gives it to who makes a sentence of it.
    """

    # Who has file descriptor 2 reads what C++ code prints; `sys.stderr` would not.

    _SERVICE = re.compile(
        r"[EF]\d{4} .*(coordination_service|client\.h|preemption_sync_manager)"
    )
    _OTHER = re.compile(r"[IWEF]\d{4} ")

    def __init__(self):
        self._real = os.dup(2)
        self._reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        # Python's own messages go the straight way: they are never held back.
        self._before = sys.stderr
        sys.stderr = os.fdopen(os.dup(self._real), "w", buffering=1)
        self._held: deque[bytes] = deque(maxlen=400)
        self._holding = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def fatal(self) -> str:
        """Returns what was held back."""
        time.sleep(0.3)  # the reading thread takes the last lines
        return b"".join(self._held).decode(errors="replace")

    def forward(self) -> None:
        """Passes on what was held back."""
        os.write(self._real, b"".join(self._held))

    def close(self) -> None:
        """Puts the real standard error back and passes on the rest."""
        os.dup2(self._real, 2)  # closes the pipe's end, which ends the thread
        sys.stderr = self._before
        self._thread.join(1)

    def _read(self) -> None:
        with os.fdopen(self._reading, "rb") as lines:
            for line in lines:
                text = line.decode(errors="replace")
                if self._SERVICE.match(text):
                    self._holding = True
                elif self._OTHER.match(text):
                    self._holding = False
                if self._holding:
                    self._held.append(line)
                else:
                    os.write(self._real, line)
