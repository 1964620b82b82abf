import os
import subprocess
import sys

import jax
import pytest

from recurjax.cli import main
from recurjax.errors import UserError
from tests.cli.commands import assert_refused, recurjax


@pytest.fixture
def failing(monkeypatch):
    """Makes `recurjax train` raise what is given."""

    def fail(error):
        def run(argv):
            raise error

        monkeypatch.setattr(main, "_find", lambda name: run)

    return fail


def test_a_device_without_enough_memory_is_told_in_one_sentence(failing):
    failing(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
    assert_refused(recurjax("train"), "not enough memory .* raise --training.accumul")


ANOTHER = jax.errors.JaxRuntimeError("INTERNAL: something else\nand more")


def test_a_machine_without_enough_memory_is_no_device_without_it(failing):
    failing(MemoryError())
    assert_refused(recurjax("train"), "this machine's memory is full: make the batch")


def test_an_error_that_nobody_foresaw_is_one_sentence_that_asks_for_a_report(failing):
    failing(ANOTHER)
    code, _, err = recurjax("train")
    assert code == 70
    assert err == (
        "recurjax: stopped by an error of its own (JaxRuntimeError: INTERNAL: "
        "something else): please report it to the repository's issues with what the "
        "same command prints with "
        "--debug\n"
    )


def test_with_debug_it_keeps_its_traceback(failing):
    failing(ANOTHER)
    with pytest.raises(jax.errors.JaxRuntimeError):
        recurjax("train", "--debug")


def test_the_sentence_names_the_place_in_our_code(monkeypatch):
    monkeypatch.setattr(main, "import_module", lambda name: None)
    _, _, err = recurjax("train")
    assert "of its own in recurjax/cli/main.py, line " in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench"], {"flags": True, "reading": False}),
        (["bench", "--own-xla-flags"], {"flags": False, "reading": False}),
        (["train", "--no-cache"], {"flags": True, "reading": False}),
        (["generate", "--no-cache"], {"flags": True, "reading": True}),
        (["serve", "--no-cache"], {"flags": True, "reading": True}),
    ],
)
def test_a_command_has_xla_s_flags_for_what_it_does(monkeypatch, words, said):
    """Who continues texts has the products of few rows; flags can be left alone."""
    messages = []
    monkeypatch.setattr(sys, "argv", ["recurjax", *words, "rat"])
    monkeypatch.setattr(
        main, "_find", lambda _: lambda argv: messages.append(argv) or 0
    )
    monkeypatch.setattr(main.host, "prepare", lambda **said: messages.append(said))
    assert main._answer(None) == 0
    assert messages == [said, ["rat"]]


@pytest.mark.parametrize("word", ["caf\udce9", "\ud800", "a\0b"])
def test_arguments_that_are_no_text_are_refused_by_their_place(word):
    assert_refused(recurjax("train", "--name", word), "argument 3 ")


@pytest.mark.parametrize("value", ["1e400", "../x", "-1", "{}", " True"])
def test_flags_that_would_end_the_process_are_refused(value, monkeypatch, failing):
    failing(UserError("has run"))
    monkeypatch.setenv("XLA_FLAGS", value)
    assert_refused(
        recurjax("train"), "XLA_FLAGS must be flags, which begin with --, or a file"
    )


def test_a_file_of_flags_stays_alone(monkeypatch, failing, tmp_path):
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=false")
    failing(UserError("has run"))
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    main.host._set_flags({"--xla_other": "1"})
    assert main.os.environ["XLA_FLAGS"] == str(tmp_path / "flags")
    assert_refused(recurjax("train"), "has run")


def run_unread(*words):
    """Runs a command of its own, whose output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "recurjax", *words],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words", [("--version",), pytest.param(("plan", "--help"), marks=pytest.mark.sweep)]
)
def test_a_reader_that_stops_reading_is_no_error(words):
    """As `recurjax ... | head -1` does, whether the text fills the pipe or not."""
    assert run_unread(*words) == (141, "")


def test_a_mistake_keeps_its_code_where_nobody_reads():
    code, err = run_unread("plna")
    assert code == 2 and "did you mean" in err


def test_another_broken_pipe_is_one_sentence(failing):
    failing(BrokenPipeError(32, "Broken pipe"))
    assert_refused(recurjax("train"), "Broken pipe")
