"""Options of a command from a dataclass, by tyro; what is wrong with them in a line."""

import ast
import dataclasses
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from recurjax.errors import UserError
from recurjax.ranges import Range, field_ranges

T = TypeVar("T")

Command = Callable[[list[str]], int]
"""Runs a command on its arguments and returns the exit code."""


def shows_usage(argv: Sequence[str], usage: str, *, help: bool = True) -> bool:
    """Prints a command's usage, with an example, if there are no arguments.

    Args:
      help: also for --help; False where `parse` lists the options.

    Returns:
      Whether it did, and the command is done.
    """
    if argv and not (help and argv[0] in ("-h", "--help")):
        return False
    print(usage)
    return True


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script's main and ends the process with the code that it returns.

    A mistake of the user is one sentence after the script's name, and exit code 1.
    """
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def read_adapters(options: Sequence[str]) -> dict[str, Path]:
    """Returns the run directories of --adapter NAME=RUN by their names.

    Raises:
      UserError: an option of another form, or two of one name.
    """
    runs: dict[str, Path] = {}
    for option in options:
        name, _, run = option.partition("=")
        if not name or not run:
            raise UserError(f"--adapter {option}: must be NAME=RUN, a run of adapters")
        if name in runs:
            raise UserError(f"--adapter {option}: {name} names {runs[name]} already")
        runs[name] = Path(run)
    return runs


def run_command(
    argv: list[str], commands: Mapping[str, Command], *, prog: str, usage: str
) -> int:
    """Runs the command that the first argument names.

    Raises:
      UserError: there is no such command.
    """
    if shows_usage(argv, usage):
        return 0
    if argv[0] not in commands:
        near = difflib.get_close_matches(argv[0], commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(commands)}"
        raise UserError(f"{prog} has no command {argv[0]!r}: {hint}")
    return commands[argv[0]](argv[1:])


def check_before_import(module: str, argv: Sequence[str]) -> None:
    """Refuses options that a command's module does not declare, without importing it.

    The import takes seconds, for jax and all variants. The names are those of the
    fields in the source of the module's one class `...Options`; options of a nested
    config and all values are left to `parse`.

    Raises:
      UserError: an option that the class has no field for.
    """
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    source = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (options,) = (
        node
        for node in source.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Options")
    )
    fields = [node for node in options.body if isinstance(node, ast.AnnAssign)]
    # A field whose default is a call, as of MeshConfig, has options of its own.
    names = {ast.unparse(node.target): type(node.value) is ast.Call for node in fields}
    nested = tuple(f"--{name}" for name, has_own in names.items() if has_own)
    known = [name for name, has_own in names.items() if not has_own]
    _check_known(known, [word for word in argv if not word.startswith(nested)])


def parse(kind: type[T], argv: Sequence[str], *, prog: str) -> T:
    """Makes a `kind`, a dataclass, from a command's arguments.

    A field whose default is a dataclass has options of its own: --mesh.data 2.

    Raises:
      UserError: an option that it has no field for, or a wrong value.
      SystemExit: --help (0).
    """
    _check_known(_declared(kind), argv)
    return _by_tyro(kind, argv, prog=prog)


def override(default: T, argv: Sequence[str], *, prog: str) -> T:
    """Returns `default` with fields replaced by `--dotted.name value` options.

    A field that is a union of configs keeps its member: the file chooses it.

    Raises:
      UserError: an option that `default` has no field for, or a wrong value.
      SystemExit: --help (0).
    """
    # A union's other member would need fields that this command line cannot give.
    _check_members(default, argv)
    # Before tyro, whose own list of all options would bury the one that is wrong.
    _check_known(_names(default, ""), argv)
    return _by_tyro(type(default), argv, prog=prog, default=default)


def _by_tyro(kind: type[T], argv: Sequence[str], **options: Any) -> T:
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            return tyro.cli(
                kind,
                args=list(argv),
                # Fields of configs by dots, not as subcommands of a union.
                config=(tyro.conf.AvoidSubcommands,),
                registry=_RULES,
                **options,
            )
    except SystemExit as end:
        # --help ends with 0 and has printed what it should.
        if not end.code:
            raise
        raise UserError(_with_option(_sentence(output.getvalue()))) from None
    except ValueError as error:  # from the class's own __post_init__
        raise UserError(_with_option(str(error))) from error


_RULES = tyro.constructors.ConstructorRegistry()


class _HelpOfFields:
    """A rule for help: arguments by their fields' names, and the ranges of numbers."""

    def __init__(self):
        self._busy = False

    def __call__(
        self, config: tyro.constructors.StructTypeInfo
    ) -> tyro.constructors.StructConstructorSpec | None:
        # Tyro calls this rule too when it lists the fields; then leave them to other
        # rules.
        if self._busy or not dataclasses.is_dataclass(config.type):
            return None
        self._busy = True
        try:
            spec = tyro.constructors.ConstructorRegistry.get_struct_spec(config)
        finally:
            self._busy = False
        if not isinstance(spec, tyro.constructors.StructConstructorSpec):
            return None
        ranges = field_ranges(config.type)
        fields = tuple(
            dataclasses.replace(
                field, type=_named(field), helptext=_help(field, ranges.get(field.name))
            )
            for field in spec.fields
        )
        return dataclasses.replace(spec, fields=fields)


def _help(
    field: tyro.constructors.StructFieldSpec, declared: Range | None
) -> Callable[[], str | None]:
    # Docstrings are parsed when --help shows them, and not for other command lines.
    def text() -> str | None:
        helptext = field.helptext() if callable(field.helptext) else field.helptext
        # tyro ends a paragraph before a line that begins with a quote or a dash.
        words = (helptext or "").split() + ([f"({declared})"] if declared else [])
        return " ".join(words) or None

    return text


def _named(field: tyro.constructors.StructFieldSpec) -> Any:
    # tyro names a positional argument by its type, so that two paths look the same.
    if tyro.conf.Positional not in getattr(field.type, "__metadata__", ()):
        return field.type
    many = get_origin(get_args(field.type)[0]) is tuple
    metavar = field.name.upper() + " ..." * many
    return Annotated[field.type, tyro.conf.arg(metavar=metavar)]


_RULES.struct_rule(_HelpOfFields())


@_RULES.primitive_rule
def _path(
    field: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Path] | None:
    """Reads a path; a `~` at its begin is the home, which no shell says of --json=~/x.

    A user without a home has a folder of that name.
    """
    if field.type is not Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: Path(os.path.expanduser(words[0])),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def _with_option(sentence: str) -> str:
    """Names a field that is out of range as its option."""
    # tyro says in which config, check_ranges of which class.
    match = re.match(r"(?:([\w.]+): )?[A-Z]\w*\.(\w+): (?=must be )", sentence)
    if match is None:
        return sentence
    option = ".".join(name for name in match.groups() if name).replace("_", "-")
    return f"--{option}: {sentence[match.end() :]}"


def _check_known(names: Iterable[str], argv: Sequence[str]) -> None:
    known = ["--" + name.replace("_", "-") for name in names]
    for word in argv:
        # --a-b and --a_b are the same option.
        option = word.split("=", 1)[0].replace("_", "-")
        is_option = option.startswith("--") and option not in ("--", "--help")
        if is_option and option not in known and _without_no(option) not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise UserError(f"there is no option {word.split('=', 1)[0]}: {hint}")


def _check_members(default: Any, argv: Sequence[str]) -> None:
    """Refuses options that would want another member of a union than is there."""
    for word in argv:
        if word.startswith("--"):
            _check_member(default, word.split("=", 1)[0])


def _check_member(default: Any, option: str) -> None:
    value, union, path, lacking = default, (), "", ""
    # Follow the dotted name through nested configs.
    for name in option[2:].replace("-", "_").split("."):
        if not dataclasses.is_dataclass(value):
            return
        hints = get_type_hints(type(value))
        if name not in hints:
            lacking = name  # chosen by the fields of the union's other members
            break
        path = f"{path}.{name}" if path else name
        union = tuple(m for m in get_args(hints[name]) if dataclasses.is_dataclass(m))
        value = getattr(value, name)
    # A field whose type has one class cannot be of another.
    if len(union) < 2 or not dataclasses.is_dataclass(value):
        return
    fitting = [m for m in union if not lacking or lacking in get_type_hints(m)]
    if not fitting:  # a slip of the pen, which has a hint of its own
        return
    members = ", ".join(getattr(m, "__name__", str(m)) for m in fitting)
    message = (
        f"which has no field {lacking} ({members} would)"
        if lacking
        else f"one of {members}"
    )
    raise UserError(
        f"{option}: {path} is {type(value).__name__} here, {message}: the experiment's "
        f"file chooses among them{_instead(path)}"
    )


def _instead(path: str) -> str:
    """Returns what does it on the command line, where something does."""
    if path == "data.corpus":
        return "; --corpus FILES puts your own text in its place"
    if path == "data.tokenizer":
        return "; --tokenizer bpe:4096, bytes or a tokenizer.json replaces it"
    return ""


def _declared(kind: Any) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default):
            # Options of a nested config have its name in front.
            yield from _names(field.default, f"{field.name}.")
        else:
            yield field.name


def _names(config: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _names(value, f"{name}.")
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            # tyro numbers the entries: --model.stack.pattern.0.chunk.
            for number, entry in enumerate(value):
                yield from _names(entry, f"{name}.{number}.")
        else:
            yield name


def _without_no(option: str) -> str:
    """Turns tyro's `--a.no-flag` into `--a.flag`."""
    head, dot, last = option.removeprefix("--").rpartition(".")
    # tyro puts the "no-" before the last part.
    return f"--{head}{dot}{last.removeprefix('no-')}"


def _sentence(box: str) -> str:
    """Extracts the first paragraph of tyro's framed message, and the type it wants.

    The frame is drawn with spaces and dashes where standard output is not UTF-8.
    """
    lines = [line.strip("│ ") for line in box.splitlines()][1:]
    lines = list(dropwhile(_is_rule, lines))
    text = " ".join(takewhile(lambda line: not _is_rule(line), lines))
    # tyro repeats an option's name in front of its message.
    text = re.sub(r"^(\S+): (?=\1\b)", "", text.removeprefix("Error parsing "))
    if "Argument helptext:" in lines:
        kind = lines[lines.index("Argument helptext:") + 1].partition(" ")[2]
        kind = re.sub(r"\bINT\b", "an integer", kind).replace("{None}|", "")
        text = f"{text.rstrip('.')} (it needs {kind})"
    return text


def _is_rule(line: str) -> bool:
    return not line.strip("╭─╮╰╯- ")
