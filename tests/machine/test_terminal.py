import io
import sys

import pytest
from rich.console import Console

from recurjax.machine import terminal

TEXT = "\x1b]0;title\x07 \x1b[2J\x9b31m\r a\tb\nné 🌍\x7f\x00"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind, clean", [(Terminal, True), (io.StringIO, False)])
def test_a_models_text_is_no_command_to_a_terminal(kind, clean, monkeypatch):
    """A terminal shows the control characters of a model's text as pictures."""
    out = kind()
    monkeypatch.setattr(sys, "stdout", out)
    terminal.write(TEXT)
    shown = "␛]0;title␇ ␛[2J\ufffd31m␍ a\tb\nné 🌍␡␀"
    assert out.getvalue() == (shown if clean else TEXT)


@pytest.mark.parametrize("shown", [True, False])
def test_a_terminal_shows_the_seconds_of_what_takes_long(shown):
    out = io.StringIO()
    console = Console(file=out, force_terminal=shown, width=40)
    with terminal.shown_elapsed("compiling", console=console):
        pass
    assert ("compiling" in out.getvalue() and "0:00:00" in out.getvalue()) == shown
