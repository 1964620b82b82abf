"""Experiment files: one run in a `config()`, or many as the rows of a table.

A table is a dict `RUNS` from a row's name to its `Run`, over what the rows share:

    RUNS = {
        "rat16": Run(
            make=partial(base, chunk=16), reproduces="Table 1", expected="loss 3"
        ),
        ...
    }

and `FILE.py:rat16` names a row: `recurjax train experiments/rat/runs.py:rat16`.
"""

import difflib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from recurjax.config_json import from_json, to_json
from recurjax.errors import UserError
from recurjax.experiment import Experiment


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A row of a table of runs.

    Attributes:
      make: makes the experiment from the row's name, when the row is asked for.
      reproduces: what this is in the paper, such as "Table 9, 200M, T 8,192"; for a
        small set what it is for.
      expected: the figure there, such as "perplexity 13.42"; or what to expect.
    """

    make: Callable[[str], Experiment]
    reproduces: str
    expected: str

    def __post_init__(self):
        for name in ("reproduces", "expected"):
            text = getattr(self, name)
            if not text.strip() or "\n" in text:
                raise UserError(f"Run: {name} must be a line of text, got {text!r}")


def load_experiment(where: str | Path) -> Experiment:
    """Makes the experiment that `FILE.py` or `FILE.py:NAME` names.

    Nothing of the file stays behind: neither itself, its neighbours among the imported
    modules, nor its folder in `sys.path`.

    Raises:
      UserError: no such file or row, a table without a row's name, the file fails, or
        it makes something else or an Experiment with a value of a wrong type.
    """
    path, name = _split(where)
    with _imported(path) as module:
        table = _table(module, path)
        if table is None:
            if name is not None:
                raise UserError(f"{path} has one run and no RUNS: leave :{name} out")
            return _checked(module.config(), f"config() in {path}")
        chosen = _chosen(table, name, path)
        return _checked(table[chosen].make(chosen), f"{path}:{chosen}")


def load_runs(path: Path) -> dict[str, Run]:
    """Reads a file's table of runs.

    Raises:
      UserError: no such file, it fails, or it has no RUNS.
    """
    with _imported(path) as module:
        table = _table(module, path)
        if table is None:
            raise UserError(f"{path} has no table RUNS of runs")
        return table


def _split(where: str | Path) -> tuple[Path, str | None]:
    """Takes the row's name from behind the file's."""
    path = Path(where)
    file, colon, name = path.name.partition(":")
    return (path.with_name(file), name) if colon else (path, None)


def _table(module: ModuleType, path: Path) -> dict[str, Run] | None:
    """Returns the module's RUNS, or None where it has a config() instead."""
    table, config = getattr(module, "RUNS", None), getattr(module, "config", None)
    if table is not None and config is not None:
        raise UserError("it has both RUNS and config(): keep one of them")
    if table is None:
        if not callable(config):
            raise UserError(
                f"{path} has no function config() that returns an Experiment, and no "
                "table RUNS"
            )
        return None
    if not isinstance(table, dict) or not table:
        raise UserError("RUNS must be a dict with a Run a row")
    for name, run in table.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
            raise UserError(
                f"RUNS: a row's name has letters, digits and _, got {name!r}"
            )
        if not isinstance(run, Run):
            raise UserError(f"RUNS[{name!r}] must be a Run, not {type(run).__name__}")
    return table


def _chosen(table: dict[str, Run], name: str | None, path: Path) -> str:
    """Returns the name of the row that is meant."""
    if name in table:
        return name
    if not name:
        if len(table) == 1:
            return next(iter(table))
        rows = [f"  {n}  {r.reproduces}: {r.expected}" for n, r in table.items()]
        raise UserError(
            f"{path} has {len(table)} runs: name one, as in {path}:{next(iter(table))}"
            + "".join(f"\n{row}" for row in rows)
        )
    near = difflib.get_close_matches(name, table, n=4, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{path} alone lists them"
    raise UserError(f"{path} has no run {name}: {hint}")


def _checked(experiment: Any, maker: str) -> Experiment:
    """Returns it as it will be read back from config.json: wrong types show here."""
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"{maker} must return an Experiment, not {type(experiment).__name__}"
        )
    return from_json(Experiment, to_json(experiment), path="config")


@contextmanager
def _imported(path: Path) -> Iterator[ModuleType]:
    """Runs a file as a module that can import its neighbours, as Python runs a script.

    What fails inside becomes one sentence.
    """
    if not path.is_file():
        raise UserError(
            f"no experiment file at {path}: name a .py file with a config() or a table "
            "RUNS"
        )
    name = f"_experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: name a .py file with a config()")
    module = importlib.util.module_from_spec(spec)
    folder, modules, places = path.parent.absolute(), dict(sys.modules), list(sys.path)
    sys.modules[name] = module  # dataclasses of the file look their module up
    sys.path.insert(0, str(folder))
    try:
        with _told(path):
            spec.loader.exec_module(module)
            yield module
    finally:
        sys.path[:] = places
        sys.modules.pop(name)
        # Neighbours go too: another folder's may have the same names.
        for other in set(sys.modules) - set(modules):
            if getattr(sys.modules[other], "__file__", "") == f"{folder / other}.py":
                del sys.modules[other]


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns what goes wrong in a file into one sentence that names it."""
    try:
        yield
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise UserError(f"{where} does not parse: {error.msg}") from error
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f.lineno for f in frames if Path(f.filename) == path.absolute()]
        where = f"{path}, line {own[-1]}" if own else f"{path}"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{where}: {kind}{first_line}") from error
