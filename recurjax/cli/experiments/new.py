"""`recurjax new NAME --from EXPERIMENT`: an experiment in a file to edit."""

import dataclasses
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from recurjax.cli.options import shows_usage
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.run_table import load_experiment

_USAGE = """usage: recurjax new NAME --from EXPERIMENT

Writes NAME.py, a file to edit with the settings of an experiment: one that
`recurjax experiments` lists, such as quickstart or rat:fineweb_4k_rat16, or a file of
yours. Settings that have their default value are left out.

example: recurjax new mine --from quickstart && recurjax train mine.py"""
_WIDTH = 88


def run(argv: list[str]) -> int:
    """Runs the command."""
    if shows_usage(argv, _USAGE):
        return 0
    name, source = _read(argv)
    # The name with or without its ending.
    target = Path(name if name.endswith(".py") else f"{name}.py")
    if not re.fullmatch(r"\w+", target.stem):
        raise UserError(f"NAME must consist of letters, digits and _, got {name!r}")
    if target.exists():
        raise UserError(f"{target} exists already: choose another name or remove it")
    if not target.parent.is_dir():
        raise UserError(f"there is no directory {target.parent}")
    # A copy that kept the name would train in the other's run directory.
    experiment = dataclasses.replace(load_experiment(source), name=target.stem)
    write_atomic(target, source_of(experiment, origin=source))
    print(f"{target} has the settings of {source}", file=sys.stderr)
    print(f"recurjax train {target}")
    return 0


def source_of(experiment: Experiment, *, origin: str) -> str:
    """Returns an experiment file that makes the experiment.

    Args:
      origin: the experiment's name, for the file's docstring.
    """
    classes = {type(value) for value in _configs(experiment)}
    by_module: dict[str, list[str]] = {}
    for each in classes:
        by_module.setdefault(_public_module(each), []).append(each.__name__)
    imports = (
        _broken("from " + module + " import ", "(", sorted(names), ")", "")
        for module, names in sorted(by_module.items())
    )
    # A single import needs no parentheses unless it is broken.
    lines = [re.sub(r" import \((.*)\)$", r" import \1", text) for text in imports]
    body = _rendered(experiment, "    ", "return ")
    return f'''"""Settings from {origin}.

    recurjax train {experiment.name}.py
    recurjax train {experiment.name}.py --help    # every setting, as an option
"""

{chr(10).join(lines)}


def config() -> Experiment:
    """Returns the experiment."""
    return {body}
'''


def _configs(value: Any) -> list[Any]:
    """Lists a config and those inside it that its source names."""
    if isinstance(value, tuple):
        return [config for item in value for config in _configs(item)]
    if not dataclasses.is_dataclass(value):
        return []
    inner = [_configs(item) for _, item in _settings(value)]
    return [value, *(config for configs in inner for config in configs)]


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Lists the fields that differ from their defaults."""
    settings = []
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        # 1 and 1.0 and True are equal, and are not the same setting.
        if (value, type(value)) != (default, type(default)):
            settings.append((field.name, value))
    return settings


def _public_module(kind: type) -> str:
    """Returns the shortest package that exports a class."""
    parts = kind.__module__.split(".")
    for count in range(2, len(parts)):
        package = ".".join(parts[:count])
        if getattr(import_module(package), kind.__name__, None) is kind:
            return package
    return kind.__module__


def _rendered(value: Any, indent: str, before: str = "") -> str:
    """Writes a value as Python, over several lines where it is longer than one.

    Args:
      indent: indent of the line that it begins in.
      before: the text in front of it in that line.
    """
    deeper = indent + "    "
    if isinstance(value, tuple):
        items = [_rendered(item, deeper) for item in value]
        comma = "," if len(items) == 1 else ""
        return _broken(indent + before, "(", items, ")", comma)[len(indent + before) :]
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    items = [
        f"{name}={_rendered(item, deeper, f'{name}=')}"
        for name, item in _settings(value)
    ]
    name = type(value).__name__
    return _broken(indent + before, f"{name}(", items, ")", "")[len(indent + before) :]


def _broken(start: str, opening: str, items: list[str], end: str, comma: str) -> str:
    """Joins items in one line if they fit, else one per line."""
    line = f"{start}{opening}{', '.join(items)}{comma}{end}"
    if "\n" not in line and len(line) < _WIDTH:
        return line
    indent = start[: len(start) - len(start.lstrip())]
    inner = "".join(f"{indent}    {item},\n" for item in items)
    return f"{start}{opening}\n{inner}{indent}{end}"


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
                f"there is no option {words[at]}: recurjax new takes --from"
            )
        else:
            names.append(words[at])
        at += 1
    if len(names) != 1 or source is None:
        raise UserError("--from is missing: recurjax new NAME --from quickstart")
    return names[0], source
