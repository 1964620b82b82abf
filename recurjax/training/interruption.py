"""SIGTERM and Ctrl-C as a wish that the loop grants between two steps."""

import os
import signal
from types import FrameType
from typing import Literal

import jax
from jax.experimental import multihost_utils

from recurjax.machine import early_interrupt

Wish = Literal["terminate", "interrupt"]


class Interruption:
    """Remembers a signal until the loop asks; a second Ctrl-C stops at once.

    With several processes, jax's preemption service makes all of them answer yes at
    the same step, about ten seconds after one of them got SIGTERM; Ctrl-C is passed on
    to it as SIGTERM.
    """

    def __init__(self):
        self.wish: Wish | None = None
        self._polls = 0
        self._agreed = False
        self._shared = jax.process_count() > 1
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        # From here on a wish is remembered; one that was swallowed before ends here.
        early_interrupt.stop_if_noted()
        # jax's service has taken SIGTERM already, and tells all processes of it.
        if self._shared:
            self._handle(signal.SIGINT, self._pass_on)
        else:
            self._handle(signal.SIGINT, self._remember)
            self._handle(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # None: it was not installed from Python
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def requested(self) -> bool:
        """Says whether to stop here; every process must ask equally often."""
        if not self._shared:
            return self.wish is not None
        if not self._agreed:
            # Polls are counted: the service answers yes at the same number in every
            # process.
            self._polls += 1
            # True at the agreed poll only, not at those after it.
            self._agreed = multihost_utils.reached_preemption_sync_point(self._polls)
        if self._agreed:
            self.wish = self.wish or "terminate"
        return self._agreed

    def _handle(self, number: signal.Signals, handler) -> None:
        self._previous[number] = signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.wish = "interrupt" if number == signal.SIGINT else "terminate"
        # Who presses Ctrl-C again does not want to wait for a checkpoint.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.wish = "interrupt"
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.default_int_handler)
