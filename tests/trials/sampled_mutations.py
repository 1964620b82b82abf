"""Sampled mutations: wrong code drawn by a seed, and whether the nearest tests notice.

Reproduces no table. `mutations.py` has lines that somebody chose; here an operator over
syntax trees lists every place where one comparison, sum, number, condition or statement
can be another, and a seed draws from the list. Half of the draws are from lines that
changed since `--since`, half from all code. Each mutant is one change of a copy of the
tree, on which the nearest test files run: those that mirror the file's path, then those
that import it, then their neighbours, as many as take `--seconds` of processor time
without a change. First the tests of `make test`, and with `--slow` those of
`make test-slow` for what the first did not find: ten times the seconds.
A test file that fails without a change is left out.

Answers are kept in the file `--into`, so that a run that was stopped goes on where it
was. Expect a line a mutant and at last the score; 85 of 100 is the least. A survivor
becomes a test, or a line of sampled_mutations.jsonl with the reason why no test can
notice it: those do not count. A mutant takes 5 to 60 s on one core.

    python tests/trials/sampled_mutations.py --mutants 200 --seed 0 --into sampled.json
"""

import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import tyro

# As a script Python looks for modules next to it, not at the root of the tree.
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from recurjax.files.atomic import write_atomic  # noqa: E402
from tests.trials.mutations import copy_tree, run_tests  # noqa: E402

REASONS = Path(__file__).with_suffix(".jsonl")
LEAST = 0.85
_WARM = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "chex")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to draw and how long to test it.

    Attributes:
      mutants: how many.
      seed: draws them.
      since: a commit; every second mutant is of a line that changed after it.
      into: the file of answers; what it holds is not run again.
      most: stops after this number of new ones.
      seconds: of tests for one mutant, by the processor time without a change.
      slow: runs the slow tests on what the others did not find.
      only: the number of one mutant, which is printed and run.
    """

    mutants: int = 200
    seed: int = 0
    since: str = "cbf2ad8"
    into: Path = Path("sampled_mutations.json")
    most: int | None = None
    seconds: float = 60.0
    slow: bool = False
    only: int | None = None


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
      file: from the root of the tree.
      line: of its first character, from 1.
      start, end: of the text that it replaces, in bytes of the file.
      old, new: the text.
    """

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())} -> {self.new}"


_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"} | {
    **{"minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor"},
}


def mutants(source: bytes, file: str) -> list[Mutant]:
    """Lists every change of a file that the operators know.

    Annotations, decorators, docstrings, messages of errors and f-strings are left out:
    they decide nothing that is computed.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    for node, new in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = source[start:end].decode()
        if new != old:
            found.append(Mutant(file, node.lineno, start, end, old, new))
    return found


def _changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yields nodes and the text that takes their place, in the order of the file."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield from _changes_of(node)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _changes_of(node: Any) -> Iterator[tuple[Any, str]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            other = _COMPARE[type(op)]()
            yield node, _text(ast.Compare(left, [other], comparators))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            texts = (ast.JoinedStr, ast.Constant)
            if not any(isinstance(x, texts) and _is_text(x) for x in (left, right)):
                yield node, _text(ast.BinOp(left, _ARITHMETIC[type(op)](), right))
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, _text(ast.BoolOp(other, values))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, _text(operand)
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, str(value + 1 if isinstance(value, int) else value * 2 + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            # Others have a change of their own.
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                yield test, _text(ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Break() | ast.Continue():
            yield node, "pass"
        case ast.Call(func=ast.Name(id=name) as called) if name in _NAMES:
            yield called, _NAMES[name]
        case ast.Call(func=ast.Attribute(value=value, attr=name) as called):
            if name in _NAMES:
                yield called, _text(ast.Attribute(value, _NAMES[name]))


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


def _is_text(node: ast.expr) -> bool:
    return not isinstance(node, ast.Constant) or isinstance(node.value, str | bytes)


def code(root: Path = ROOT) -> list[str]:
    """Lists the files that mutants are drawn from, from the root of the tree.

    Templates of PyTorch modules are left out: nothing here imports them.
    """
    files = [
        file.relative_to(root).as_posix()
        for package in ("recurjax", "pallas_kernels")
        for file in sorted((root / package).rglob("*.py"))
    ]
    return [file for file in files if "convert/torch/modules/" not in file]


def changed_lines(since: str) -> dict[str, set[int]]:
    """Returns the numbers of lines that changed after a commit, by file."""
    words = ["git", "diff", "--unified=0", "--no-color", since, "--", *code()]
    diff = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    lines: dict[str, set[int]] = {}
    file = ""
    for line in diff.stdout.splitlines():
        if line.startswith("+++ b/"):
            file = line[6:]
        elif line.startswith("@@"):
            first, _, count = line.split()[2][1:].partition(",")
            numbers = range(int(first), int(first) + int(count or 1))
            lines.setdefault(file, set()).update(numbers)
    return lines


class Draws:
    """Draws mutants by their numbers; a number gives the same one on the same tree."""

    def __init__(self, seed: int, since: str):
        """Lists the mutants to draw from."""
        changed = changed_lines(since)
        self._seed = seed
        self._all = [
            mutant
            for file in code()
            for mutant in mutants((ROOT / file).read_bytes(), file)
        ]
        self._new = [m for m in self._all if m.line in changed.get(m.file, ())]

    def __getitem__(self, number: int) -> Mutant:
        pool = self._new if number % 2 and self._new else self._all
        return random.Random(f"{self._seed}/{number}").choice(pool)


# Which tests are near.


def nearest(file: str) -> list[str]:
    """Orders the test files by how near they are to a file; the far ones are left out.

    First those whose path mirrors the file's, then those of its name elsewhere, those
    that import it, and the rest of the mirrored folder; among equals those in nearer
    folders and of fewer imports.
    """
    parts = Path(file).with_suffix("").parts
    mirrored = ("tests", *(parts[1:] if parts[0] == "recurjax" else parts))
    words = {f"test_{part}" for part in mirrored[-2:]}
    module = ".".join(parts).removesuffix(".__init__")
    ranks: dict[str, tuple[int, int, int, str]] = {}
    for test, imports in _test_imports().items():
        path = Path(test).parts
        shared = len(os.path.commonprefix([path, mirrored]))  # folders
        if path[-1].removesuffix(".py") in words and shared > 1:
            rank = 0
        elif path[-1] == f"test_{parts[-1]}.py":
            rank = 1
        elif module in imports:
            rank = 2
        elif shared > 1:
            rank = 3
        elif module.rpartition(".")[0] in imports:
            rank = 4
        else:
            continue
        ranks[test] = (rank, -shared, len(imports), test)
    return sorted(ranks, key=ranks.__getitem__)


@cache
def _test_imports() -> dict[str, frozenset[str]]:
    """Returns the modules that each test file imports, by helpers of tests too."""
    found: dict[str, frozenset[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith("tests/trials/"):
            found[name] = frozenset(_imports(file))
    return found


def _imports(file: Path, *, deep: bool = True) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    for name in [name for name in names if name.startswith("tests.")] if deep else []:
        helper = (ROOT / name.replace(".", "/")).with_suffix(".py")
        if helper.is_file():
            names |= _imports(helper, deep=False)
    return {name for name in names if name.startswith(("recurjax", "pallas_kernels"))}


# Running them.


class Lane(NamedTuple):
    """Tests that run on a mutant.

    Attributes:
      marks: of the tests, as pytest's -m takes them.
      seconds: of processor time that they may take without a change.
      files, tests: under which names answers keep times of files, and a mutant's tests.
    """

    marks: str
    seconds: float
    files: str
    tests: str


class Trial:
    """A copy of the tree, and what its tests do without a change."""

    def __init__(self, root: Path, answers: dict[str, Any], keep: Callable[[], None]):
        """Extends `answers["files"]`: the seconds of a test file, None if it fails."""
        self._root, self._keep, self._answers = root, keep, answers
        copy_tree(root)

    def tests_for(self, mutant: Mutant, lane: Lane) -> list[str]:
        """Lists the nearest test files that take a lane's time without a change."""
        seconds, files = lane.seconds, self._answers.setdefault(lane.files, {})
        left, tests = seconds, []
        for test in nearest(mutant.file):
            if test not in files:
                code, taken = run_tests(
                    [test], self._root, seconds=3 * seconds, marks=lane.marks
                )
                files[test] = taken if code == 0 else None
                self._keep()
            taken = files[test]
            if taken is not None and (taken <= left or not tests):
                tests.append(test)
                left -= taken
            if left < 0.1 * seconds or len(tests) == 12:
                break
        return tests

    def is_found(self, mutant: Mutant, tests: list[str], lane: Lane) -> bool:
        """Runs tests on the mutant; what takes thrice its time and a minute hangs."""
        file = self._root / mutant.file
        whole = file.read_bytes()
        file.write_bytes(
            whole[: mutant.start] + mutant.new.encode() + whole[mutant.end :]
        )
        files = self._answers[lane.files]
        limit = 60 + 3 * sum(files[test] or 0.0 for test in tests)
        options = {"seconds": limit, "marks": lane.marks}
        try:
            return run_tests(tests, self._root, **options, any_end=True).code != 0
        finally:
            file.write_bytes(whole)


def reasons() -> dict[tuple[str, str], str]:
    """Reads why some mutants cannot be noticed, by their names and lines of code."""
    lines = REASONS.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["mutant"], row["code"]): row["reason"] for row in rows}


def _name_and_code(row: dict[str, Any]) -> tuple[str, str]:
    file = row["mutant"].partition(": ")[0]
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return row["mutant"], lines[row["line"] - 1].strip()


def main(options: Options) -> int:
    """Runs what has no answer yet and prints the score."""
    for name in _WARM:
        import_module(name)
    draws = Draws(options.seed, options.since)
    if options.only is not None:
        print(draws[options.only])
    answers: dict[str, Any] = {}
    if options.into.is_file():
        answers = json.loads(options.into.read_text(encoding="utf-8"))

    def keep() -> None:
        write_atomic(options.into, json.dumps(answers, indent=1) + "\n")

    rows: dict[str, dict[str, Any]] = answers.setdefault("mutants", {})
    numbers = range(options.mutants) if options.only is None else [options.only]
    keys = {number: f"{options.seed}/{number}" for number in numbers}
    fast = Lane("not slow", options.seconds, "files", "tests")
    slow = Lane("slow and not sweep", 10 * options.seconds, "slow_files", "slow_tests")
    left = [(number, fast) for number in numbers if keys[number] not in rows]
    if options.slow:
        survivors = (n for n in numbers if not rows.get(keys[n], {}).get("found", True))
        left += [(n, slow) for n in survivors if slow.tests not in rows[keys[n]]]
    with tempfile.TemporaryDirectory(prefix="sampled-") as folder:
        trial = Trial(Path(folder), answers, keep) if left else None
        for number, lane in left[: options.most]:
            assert trial is not None
            mutant = draws[number]
            tests = trial.tests_for(mutant, lane)
            found = bool(tests) and trial.is_found(mutant, tests, lane)
            row = rows.setdefault(
                keys[number], {"mutant": mutant.name, "line": mutant.line}
            )
            row |= {"found": found, lane.tests: tests}
            keep()
            message = "found    " if found else "NOT FOUND"
            print(f"{number} {message} line {mutant.line} of {mutant.name}", flush=True)
    excused = reasons()
    done = [rows[key] for key in keys.values() if key in rows]
    counted = [
        row for row in done if row["found"] or _name_and_code(row) not in excused
    ]
    score = sum(row["found"] for row in counted)
    print(
        f"{score} of {len(counted)} found, {len(done) - len(counted)} that no test can "
        f"notice, {len(keys) - len(done)} not run"
    )
    return int(score < LEAST * len(counted))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(tyro.cli(Options, description=__doc__)))
