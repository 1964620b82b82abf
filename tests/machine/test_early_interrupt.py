"""Ctrl-C in the first seconds ends the process, and later it is raised and noted."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from recurjax.cli import main
from recurjax.errors import UserError
from recurjax.machine import early_interrupt
from recurjax.training import loop
from recurjax.training.loop import Interruption
from tests.source_tree import ROOT
from tests.training import tiny_experiment
from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def swallow():
    """Presses Ctrl-C where the exception gets lost."""
    with suppress(KeyboardInterrupt):
        press()


def test_it_is_raised_at_once_and_again_where_it_was_swallowed():
    with early_interrupt.watched():
        early_interrupt.work_begins()
        early_interrupt.stop_if_noted()
        with pytest.raises(KeyboardInterrupt):
            press()
        with pytest.raises(KeyboardInterrupt):
            early_interrupt.stop_if_noted()
        with pytest.raises(KeyboardInterrupt), Interruption():
            raise AssertionError("the loop began")


def test_outside_of_a_watch_nothing_is_noted():
    before = signal.getsignal(signal.SIGINT)
    with early_interrupt.watched():
        early_interrupt.work_begins()
        swallow()
        assert early_interrupt.was_noted()
    assert signal.getsignal(signal.SIGINT) is before
    early_interrupt.stop_if_noted()
    swallow()
    early_interrupt.stop_if_noted()


@pytest.fixture
def as_a_program(monkeypatch, capsys):
    """Runs `recurjax WORDS` as from a shell, and returns what `main` does."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["recurjax", *map(str, words)])
        # Settings of a process that is not ours.
        monkeypatch.setattr(main.host, "prepare", lambda **_: None)
        monkeypatch.setattr(main, "_end_at_once", lambda code: None)
        code = main.main()
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def ends(monkeypatch):
    """Exit statuses of the handler, which does not end the tests' process."""
    codes = []
    monkeypatch.setattr(early_interrupt.os, "_exit", codes.append)
    return codes


def test_before_the_work_begins_the_process_ends_in_the_handler(ends, capsys):
    with early_interrupt.watched():
        swallow()
    assert ends == [130] and capsys.readouterr().err == "recurjax: interrupted\n"


def test_a_process_with_children_is_left_through_the_exception(ends, monkeypatch):
    monkeypatch.setattr(early_interrupt, "active_children", lambda: ["a worker"])
    with early_interrupt.watched(), pytest.raises(KeyboardInterrupt):
        press()
    assert not ends


def test_while_a_session_is_opened_it_ends_the_process(
    as_a_program, ends, monkeypatch, tmp_path
):
    class Session(loop.Session):
        def __init__(self, *_, **__):
            swallow()
            raise UserError("a process that has ended goes no further")

    monkeypatch.setattr(loop, "Session", Session)
    words = ("train", tiny_experiment.__file__, "--runs", tmp_path, "--no-cache")
    _, said = as_a_program(*words)
    assert ends == [130] and said.startswith("recurjax: interrupted\n")


def test_where_python_drops_it_nothing_is_printed(capsys, monkeypatch):
    # pytest's own hook keeps what it gets.
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)

    class Dropped:
        def __del__(self):
            press()

    with early_interrupt.watched():
        early_interrupt.work_begins()
        Dropped()
        with pytest.raises(KeyboardInterrupt):
            early_interrupt.stop_if_noted()
    assert capsys.readouterr().err == ""


def test_an_error_that_native_code_made_of_it_is_an_interruption(
    as_a_program, monkeypatch
):
    def run(argv):
        early_interrupt.work_begins()
        swallow()
        raise RuntimeError("INTERNAL: CpuCallback error: KeyboardInterrupt")

    monkeypatch.setattr(main, "_find", lambda name: run)
    assert as_a_program("doctor") == (130, "recurjax: interrupted\n")


PRESSED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass
sys.meta_path.insert(0, Finder())
from recurjax.cli.main import main
sys.argv = ["recurjax", "train", {file!r}, "--runs", {runs!r}]
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurjax.cli.train", "jax", "orbax", "grain"])
def test_swallowed_in_an_import_it_ends_the_process_all_the_same(
    quick_compilation, tmp_path, name
):
    script = PRESSED.format(
        name=name, file=tiny_experiment.__file__, runs=str(tmp_path)
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=quick_compilation,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (130, "recurjax: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0, 3.0])
def test_pressed_at_any_early_moment_it_ends_in_a_sentence(
    quick_compilation, tmp_path, seconds
):
    words = ["-m", "recurjax", "train", tiny_experiment.__file__]
    words += ["--runs", str(tmp_path), "--training.steps", "1000000"]
    words += ["--evaluation.every", "0"]
    process = subprocess.Popen(
        [sys.executable, *words],
        env=quick_compilation | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # Both are 130 in a shell: after one inside exec("...") Python itself ends the
    # process by the signal, however the exception was handled.
    assert process.returncode in (130, -signal.SIGINT), (out, err)
    # Before the loop: a sentence. In it: what was done is saved.
    saved = re.search(r"interrupted at step \d+, saved in", out)
    assert err == ("" if saved else "recurjax: interrupted\n"), (out, err)
