"""`recurjax new NAME --from EXPERIMENT`: a copy of an experiment, to edit."""

import re
import sys
from pathlib import Path

from recurjax.cli.options import shows_usage
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.run_table import find_experiment

_USAGE = """usage: recurjax new NAME --from EXPERIMENT

Writes NAME.py, a copy of an experiment's file to edit: one of `recurjax experiments`,
such as quickstart or rat, or a file of yours. A table is copied with all its runs."""


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, _USAGE):
        return 0
    # The file is copied whole: a row of a table needs what the rows share.
    name, source = _read(argv)
    file, row = find_experiment(source)
    if not file.is_file():
        raise UserError(
            f"no experiment file at {file}: `recurjax experiments` lists some"
        )
    # The name with or without its ending.
    target = Path(name if name.endswith(".py") else f"{name}.py")
    if not re.fullmatch(r"\w+", target.stem):
        raise UserError(f"NAME must have letters, digits and _, got {name!r}")
    if target.exists():
        raise UserError(f"{target} exists already: choose another name or remove it")
    if not target.parent.is_dir():
        raise UserError(f"there is no directory {target.parent}")
    text = file.read_text(encoding="utf-8")
    # A copy that kept the name would train in the other's run directory.
    text = text.replace(f'name="{file.stem}"', f'name="{target.stem}"')
    write_atomic(target, text)
    print(f"{target} is a copy of {file}", file=sys.stderr)
    print(f"recurjax train {target}" + (f":{row}" if row else ""))
    return 0


def _read(argv: list[str]) -> tuple[str, str]:
    # --from=NAME as --from NAME.
    words = [part for word in argv for part in word.split("=", 1)]
    names, source, at = [], None, 0
    while at < len(words):
        if words[at] == "--from":
            at += 1
            source = words[at] if at < len(words) else None
        elif words[at].startswith("-"):
            raise UserError(
                f"there is no option {words[at]}: recurjax new knows --from"
            )
        else:
            names.append(words[at])
        at += 1
    if len(names) != 1 or source is None:
        raise UserError("say what to copy: recurjax new NAME --from quickstart")
    return names[0], source
