"""Ctrl-C before a command's work has begun, so that none is lost.

Python raises KeyboardInterrupt wherever the program happens to be. In the first seconds
that is often a callback of native code, a finalizer or a library's bare `except:`,
where an exception is printed or dropped and the program goes on. So the signal is noted
as well as raised, and who is about to begin something long asks for the note.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_noted = False


@contextmanager
def watched() -> Iterator[None]:
    """Notes Ctrl-C while the block runs; the main thread's, where signals arrive.

    Who takes the signal over inside the block, as training does, gives it back.
    """
    global _noted
    _noted = False
    before, hook = signal.signal(signal.SIGINT, _note), sys.unraisablehook
    # Where Python drops the exception it prints it; here it is noted and comes again.
    sys.unraisablehook = lambda lost: _noted_already(lost) or hook(lost)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
        _noted = False


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
    signal.default_int_handler(number, frame)
