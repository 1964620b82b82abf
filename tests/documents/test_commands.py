"""Every command that a document shows is one that its parser takes.

The blocks that `test_documents.py` runs are few. Here the words of all commands, those
in tables and sentences too, go through the parser of their command or script, which
then ends.
"""

import argparse
import re
import shlex
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import tyro

from recurjax.cli import plan
from recurjax.cli.main import COMMANDS, module_of
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.run_table import find_experiment
from tests.documents.blocks import FENCE, blocks_of
from tests.source_tree import ROOT, documents

START = r"(?:recurjax(?= )|python (?:experiments/[\w/]+\.py|-m experiments[\w.]+))"
INLINE = re.compile(rf"`({START}(?: [^`]*)?)`")
LINE = re.compile(
    rf"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?({START}.*)$", re.MULTILINE
)
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
PATTERN = re.compile(r"\.\.\.|[|\[{…]|\b(?:COMMAND|EXPERIMENT|KIND)\b")
"""In the form of several commands."""
UNPARSED = ("doctor", "experiments", "new", "runs")
"""Commands that read their few words themselves."""
GROUPS = ("convert", "data", "evaluate")
SHORTENED = re.compile("Missing from|name the experiment|--topology is missing")
"""What a parser says of a sentence's words without their RUN or FILE."""
ELSEWHERE = re.compile("there is no directory|needs the package")
"""What it says of folders and packages that are not here."""


def commands_of(document: Path) -> list[list[str]]:
    """Returns the words of each command in a document, each once."""
    around = _joined(FENCE.sub("", document.read_text()))
    lines = [_joined(block.body) for block in blocks_of(document)]
    lines += INDENTED.findall(around)
    found = INLINE.findall(around) + LINE.findall("\n".join(lines))
    found = [" ".join(each.split("  #")[0].split()) for each in found]
    return [
        shlex.split(re.sub(r"\b(?:gs|s3)://", "", each))
        for each in dict.fromkeys(found)
        if not PATTERN.search(each)
    ]


def _joined(text: str) -> str:
    """Joins lines that end with a backslash to the next."""
    return re.sub(r"\\\n *", " ", text)


class Taken(BaseException):
    """A parser has taken all words."""


@pytest.fixture
def parsers(monkeypatch):
    """Ends a command as soon as its parser has taken the words."""
    real, real_arguments = tyro.cli, argparse.ArgumentParser.parse_args

    def cli(kind, *args, **options):
        made = real(kind, *args, **options)
        # `train` and `plan` read options of their own first.
        if sys.argv[0] not in ("train", "plan") or issubclass(kind, Experiment):
            raise Taken
        return made

    def parse_args(self, *args, **options):
        real_arguments(self, *args, **options)
        raise Taken

    monkeypatch.setattr(tyro, "cli", cli)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(plan, "check_compilers", lambda topology: None)


def call_script(words: list[str], monkeypatch) -> None:
    """Calls a script's main with its words."""
    script, *rest = words[2:] if words[1] == "-m" else words[1:]
    module = script.removesuffix(".py").replace("/", ".")
    monkeypatch.syspath_prepend((ROOT / module.replace(".", "/")).parent)
    monkeypatch.setattr(sys, "argv", [script, *rest])
    main = import_module(module).main
    main(rest) if main.__code__.co_argcount else main()


def has_parser(script: str) -> bool:
    """Returns whether a script reads words."""
    source = (ROOT / script).read_text()
    return re.search("argparse|tyro|parse[(]", source) is not None


def call_command(words: list[str], monkeypatch) -> None:
    """Calls a command of recurjax, with sft where the reader has an experiment."""
    command, *rest = words[1:]
    if command in ("train", "plan", "describe") and not rest[0].startswith("-"):
        file = rest[0]
        with suppress(UserError):
            file = str(find_experiment(file)[0])
        if not Path(file).exists():
            rest[0] = "sft"
    monkeypatch.setattr(sys, "argv", [command, *rest])
    import_module(module_of(command)).run(rest)


def is_skipped(words: list[str]) -> bool:
    """Returns whether a command has no words for a parser."""
    if words[0] != "recurjax":
        return len(words) == 2 and not has_parser(words[1])
    named_only = not arguments_of(words)  # in a sentence
    return words[1] in (*UNPARSED, "--version") or words[-1] == "--help" or named_only


def arguments_of(words: list[str]) -> list[str]:
    """Returns the words after the name of a command of recurjax."""
    return words[3:] if words[1] in GROUPS else words[2:]


@pytest.mark.parametrize(
    "document",
    [path for path in documents() if commands_of(path)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_parsers_take_the_commands(document, parsers, monkeypatch):
    wrong = []
    for words in commands_of(document):
        if is_skipped(words):
            continue
        of_ours = words[0] == "recurjax"
        if of_ours and words[1] not in COMMANDS:
            wrong.append(f"{shlex.join(words)}: there is no such command")
            continue
        try:
            (call_command if of_ours else call_script)(words, monkeypatch)
            wrong.append(f"{shlex.join(words)}: no parser was called")
        except Taken:
            pass
        except UserError as error:
            shortened = of_ours and arguments_of(words)[0].startswith("-")
            allowed = shortened and SHORTENED.match(str(error))
            if not allowed and not ELSEWHERE.search(str(error)):
                wrong.append(f"{shlex.join(words)}: {error}")
        except SystemExit as error:
            wrong.append(f"{shlex.join(words)}: exit {error.code}")
    assert not wrong, "\n".join(wrong)
