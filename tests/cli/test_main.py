import sys

import jax
import pytest

from recurjax.cli import main
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


def test_an_error_that_nobody_foresaw_is_one_sentence_that_asks_for_a_report(failing):
    failing(ANOTHER)
    code, _, err = recurjax("train")
    assert code == 70
    assert err == (
        "recurjax: stopped by an error of its own (JaxRuntimeError: INTERNAL: "
        "something else): please report it with what the same command prints with "
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


@pytest.mark.parametrize(("words", "flags"), [([], True), (["--own-xla-flags"], False)])
def test_xla_s_flags_can_be_left_alone(monkeypatch, words, flags):
    told = []
    monkeypatch.setattr(sys, "argv", ["recurjax", "bench", *words, "rat"])
    monkeypatch.setattr(main, "_find", lambda _: lambda argv: told.append(argv) or 0)
    monkeypatch.setattr(main.host, "prepare", lambda **said: told.append(said))
    assert main._answer(None) == 0
    assert told == [{"flags": flags, "reading": False}, ["rat"]]


@pytest.mark.parametrize(
    ("command", "reading"), [("train", False), ("generate", True), ("serve", True)]
)
def test_who_continues_texts_has_the_products_of_few_rows(
    monkeypatch, command, reading
):
    told = []
    monkeypatch.setattr(sys, "argv", ["recurjax", command, "--no-cache"])
    monkeypatch.setattr(main, "_find", lambda _: lambda argv: 0)
    monkeypatch.setattr(main.host, "prepare", lambda **said: told.append(said))
    assert main._answer(None) == 0
    assert told == [{"flags": True, "reading": reading}]


@pytest.mark.parametrize("word", ["caf\udce9", "\ud800", "a\0b"])
def test_arguments_that_are_no_text_are_refused_by_their_place(word):
    assert_refused(recurjax("train", "--name", word), "argument 3 ")
