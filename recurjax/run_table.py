"""Experiment files: one run in a `config()`, or many as the rows of a table.

A table is a dict `RUNS` from a row's name to its `Run`, over what the rows share:

    RUNS = {
        "rat16": Run(
            make=partial(base, chunk=16), reproduces="Table 1", expected="loss 3"
        ),
        ...
    }

and `FILE.py:rat16` names a row: `recurjax train experiments/rat/runs.py:rat16`.

Files in experiments/ also have names: `quickstart` is experiments/quickstart.py, `rat`
experiments/rat/runs.py and `rat:fineweb_4k_rat16` a row of it, from a clone and from an
installed package, in which the folder is the package recurjax_experiments.
"""

import ast
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
from typing import TYPE_CHECKING, Any

from recurjax.config_json import from_json, to_json
from recurjax.errors import UserError

if TYPE_CHECKING:  # Listing experiments imports no jax.
    from recurjax.experiment import Experiment
    from recurjax.model import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A row of a table of runs.

    Attributes:
      make: makes the experiment from the row's name, when the row is requested.
      reproduces: what this is in the paper, such as "Table 9, 200M, T 8,192"; for a
        small set what it is for.
      expected: the figure there, such as "perplexity 13.42"; or what to expect.
    """

    make: Callable[[str], "Experiment"]
    reproduces: str
    expected: str

    def __post_init__(self):
        for name in ("reproduces", "expected"):
            text = getattr(self, name)
            if not text.strip() or "\n" in text:
                raise UserError(f"Run: {name} must be a line of text, got {text!r}")


def load_experiment(where: str | Path) -> "Experiment":
    """Makes the experiment that `FILE.py`, `FILE.py:ROW`, or a name names.

    Nothing of the file stays behind: neither itself, its neighbours among the imported
    modules, nor its folder in `sys.path`.

    Raises:
      UserError: no such file or row, a table without a row's name, the file fails, or
        it makes something else or an Experiment with a value of a wrong type.
    """
    path, name = find_experiment(where)
    with _imported(path) as module:
        table = _table(module, path)
        if table is None:
            if name is not None:
                raise UserError(
                    f"{path} has a single run and no table RUNS: leave :{name} out"
                )
            return _checked(module.config(), f"config() in {path}")
        row = _row_name(table, name, path)
        return _checked(table[row].make(row), f"{path}:{row}")


def load_runs(path: Path) -> dict[str, Run]:
    """Reads a file's table of runs.

    Raises:
      UserError: no such file, it fails, or it has no RUNS.
    """
    with _imported(path) as module:
        table = _table(module, path)
        if table is None:
            raise UserError(f"{path} has no table RUNS: name a file that has one")
        return table


def model_in(directory: str) -> "ModelConfig | None":
    """Returns the model of a run directory, such as an imported one; None: no run.

    A row that starts from a checkpoint takes vocabulary and sizes from it.
    """
    from recurjax.experiment import read_experiment

    file = Path(directory) / "config.json"
    return read_experiment(file).model if file.is_file() else None


def experiments_folder() -> Path:
    """Returns where the experiments of this version are.

    Raises:
      UserError: the package was installed without them.
    """
    package = Path(__file__).parent
    beside = package.with_name("experiments")  # of a clone, also an editable one
    if (package.with_name("pyproject.toml")).is_file() and beside.is_dir():
        return beside
    installed = package.with_name("recurjax_experiments")
    if not installed.is_dir():
        raise UserError(
            f"the folder of experiments is missing next to {package}: "
            "reinstall recurjax, or name an experiment's file"
        )
    return installed


def shipped_experiments() -> dict[str, Path]:
    """Lists the files of `experiments_folder` by their names, sorted."""
    folder = experiments_folder()
    tables = {file.parent.name: file for file in folder.glob("*/runs.py")}
    # Read as text: listing experiments must not run them.
    files = {f.stem: f for f in folder.glob("*.py") if _makes_one(f.read_text())}
    return dict(sorted((files | tables).items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A row of a paper's table in experiments/README.md, as its cells say it."""

    name: str
    reproduces: str
    expected: str
    parameters: str
    tokens: str


def listed_runs(name: str) -> list[ListedRun]:
    """Lists the runs of one of `shipped_experiments`; [] where it is a single run.

    The README has them, so that no table of runs is imported, and with it jax.
    """
    text = (experiments_folder() / "README.md").read_text(encoding="utf-8")
    start, end = f"<!-- {name}/runs.py -->\n", "<!-- end -->"
    lines = text.partition(start)[2].partition(end)[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return [
        ListedRun(
            name=row[0].strip("`"),
            reproduces=row[1],
            expected=row[2],
            parameters=row[4],
            tokens=row[5],
        )
        for row in rows
    ]


def find_experiment(where: str | Path) -> tuple[Path, str | None]:
    """Returns the file, and the row if one is named, that `where` means.

    Raises:
      UserError: it is neither a file nor a name of `shipped_experiments`.
    """
    path, row = _split(where)
    # A path, even to a file that is missing, is not a name: the error will say which
    # file.
    if path.is_file() or path.suffix or len(path.parts) != 1:
        return path, row
    known = shipped_experiments()
    if path.name in known:
        return known[path.name], row
    near = difflib.get_close_matches(path.name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"there is no experiment {path.name}: {hint}`recurjax experiments` lists them, "
        "and a file of yours is named with its .py"
    )


def summary_of(file: Path) -> str:
    """Returns the first line of a file's docstring, without running the file."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _makes_one(text: str) -> bool:
    return "\ndef config()" in text


def _split(where: str | Path) -> tuple[Path, str | None]:
    """Returns the row's name, which follows the file's."""
    path = Path(where)
    # Only after the last slash: a drive or a bucket has its colon in front.
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
        raise UserError("RUNS must be a dict with a Run per row")
    for name, run in table.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
            raise UserError(
                "RUNS: a row's name must consist of letters, digits and _, got "
                f"{name!r}"
            )
        if not isinstance(run, Run):
            raise UserError(f"RUNS[{name!r}] must be a Run, not {type(run).__name__}")
    return table


def _row_name(table: dict[str, Run], name: str | None, path: Path) -> str:
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


def _checked(experiment: Any, maker: str) -> "Experiment":
    """Returns it as it will be read back from config.json: wrong types show here."""
    from recurjax.experiment import Experiment

    if not isinstance(experiment, Experiment):
        raise UserError(
            f"{maker} must return an Experiment, not {type(experiment).__name__}"
        )
    # Types of a dataclass' fields are not checked when it is made. Written to JSON and
    # read back, each value meets its declared type, as it would on resuming.
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
    # While the file runs, and while its function makes the experiment: both may import.
    try:
        with _one_sentence(path):
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
def _one_sentence(path: Path) -> Iterator[None]:
    """Turns what goes wrong in a file into one sentence that names it."""
    try:
        yield
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise UserError(f"{where} does not parse: {error.msg}") from error
    except Exception as error:
        if isinstance(error, UserError) and str(path) in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        # The last line of the user's file in the trace, not one inside the library.
        lines = [f.lineno for f in frames if Path(f.filename) == path.absolute()]
        where = f"{path}, line {lines[-1]}" if lines else f"{path}"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{where}: {kind}{first_line}") from error
