"""Options of a command from a dataclass, by tyro, with a short word on unknown ones."""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

from recurjax.errors import UserError

T = TypeVar("T")


def override(default: T, argv: Sequence[str], *, prog: str) -> T:
    """Returns `default` with fields replaced by `--dotted.name value` options.

    A field that is a union of configs keeps its member: the file chooses it.

    Raises:
      UserError: an option that `default` has no field for.
      SystemExit: a wrong value (2, after tyro has said which), or --help (0).
    """
    known = [f"--{name}" for name in _names(default, "")]
    for word in argv:
        option = word.split("=", 1)[0].replace("_", "-")
        is_option = option.startswith("--") and option not in ("--", "--help")
        flag = _without_no(option)
        if is_option and option not in known and flag not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise UserError(f"there is no option {word.split('=', 1)[0]}: {hint}")
    return tyro.cli(
        type(default),
        default=default,
        args=list(argv),
        prog=prog,
        config=(tyro.conf.AvoidSubcommands,),
    )


def _names(config: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(config):
        name = prefix + field.name.replace("_", "-")
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _names(value, f"{name}.")
        else:
            yield name


def _without_no(option: str) -> str:
    """Turns tyro's `--a.no-flag` into `--a.flag`."""
    head, dot, last = option.rpartition(".")
    last = last.removeprefix("--") if not dot else last
    return f"{head}{dot}{last.removeprefix('no-')}" if dot else f"--{last[3:]}"
