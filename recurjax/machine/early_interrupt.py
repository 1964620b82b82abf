"""Ctrl-C before a command's work has begun, so that none is lost.

Python raises KeyboardInterrupt wherever the program happens to be. In the first seconds
that is often a callback of native code, a finalizer or a library's bare `except:`: the
exception is printed or dropped and the program continues, or the native code aborts. So
until the work begins there is no exception: the handler says the sentence and ends the
process, which has nothing to clean up yet. From then on the signal is noted as well as
raised, and who is about to begin something long asks for the note.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from types import FrameType

CODE = 130
"""The exit status of a command that Ctrl-C ended: 128 and the signal's number."""

SENTENCE = "recurjax: interrupted"
_noted = False
_working = True


@contextmanager
def watched() -> Iterator[None]:
    """Hears Ctrl-C while the block runs; the main thread's, where signals arrive.

    It ends the process until `work_begins` is called. Who takes the signal over inside
    the block, as training does, gives it back.
    """
    global _noted, _working
    _noted = _working = False
    before, hook = signal.signal(signal.SIGINT, _note), sys.unraisablehook
    # Where Python drops the exception it prints it; here it is noted and comes again.
    sys.unraisablehook = lambda lost: _noted_already(lost) or hook(lost)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
        _noted, _working = False, True


def work_begins() -> None:
    """From now on raises an interruption, because there is something to clean up."""
    global _working
    _working = True


def was_noted() -> bool:
    """Whether Ctrl-C was pressed since the watch began."""
    return _noted


def stop_if_noted() -> None:
    """Raises KeyboardInterrupt again if it was raised where nobody heard it."""
    if _noted:
        raise KeyboardInterrupt


def _noted_already(lost: "sys.UnraisableHookArgs") -> bool:
    return _noted and lost.exc_type is KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    _noted = True
    # A child process would outlive this one; a raised exception ends it too.
    if not _working and not active_children():
        _end_at_once()
    signal.default_int_handler(number, frame)


def _end_at_once() -> None:
    with suppress(RuntimeError):  # the signal came while something was printed
        sys.stdout.flush()
        print(SENTENCE, file=sys.stderr, flush=True)
    os._exit(CODE)
