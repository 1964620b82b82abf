"""Mutations: one wrong line at a time, and the tests that should notice it.

Reproduces no table. Each row of mutations.jsonl replaces one piece of one file in a
copy of the working tree and runs the tests that the row names there: a mutation that no
test notices is a hole in the suite. Answers are kept in the file `--into`, so that a
run that was stopped goes on where it was. Expect a line a mutation and at last how many
were found; 95 of 100 is the least. A mutation takes seconds to half a minute on one
core; `--only TEXT` runs those whose file, line or tests hold a text.

    python tests/trials/mutations.py --into mutations.json --only spikes
"""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import tyro

from recurjax.files.atomic import write_atomic

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".jsonl")


class Mutation(NamedTuple):
    """One wrong line.

    Attributes:
      file: from the root of the tree.
      line: a piece of it that is there exactly once.
      instead: what takes its place.
      tests: words for pytest, of which one test at least should fail.
    """

    file: str
    line: str
    instead: str
    tests: str

    @property
    def name(self) -> str:
        """Names it in the file of answers."""
        return f"{self.file}: {self.line} -> {self.instead}"


def mutations() -> list[Mutation]:
    """Reads the table, one JSON object a line."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [Mutation(**json.loads(line)) for line in lines]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to run.

    Attributes:
      into: the file of answers; what it holds is not run again.
      only: mutations whose file, line or tests hold this text.
      most: stops after so many.
      seconds: of processor time for the tests of one mutation; what takes longer
        counts as found.
    """

    into: Path = Path("mutations.json")
    only: str = ""
    most: int | None = None
    seconds: int = 600


def apply(mutation: Mutation, root: Path) -> str:
    """Changes the file below `root`; returns what it held.

    Raises:
      ValueError: the line is not there, or more than once.
    """
    file = root / mutation.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutation.line) != 1:
        raise ValueError(f"{mutation.name}: found {text.count(mutation.line)} times")
    file.write_text(text.replace(mutation.line, mutation.instead), encoding="utf-8")
    return text


def is_found(mutation: Mutation, root: Path, seconds: int) -> bool:
    """Runs the tests on a tree that has the mutation, and mends the tree."""
    held = apply(mutation, root)
    try:
        return run_tests(_words(mutation.tests), root, seconds=seconds).code != 0
    finally:
        (root / mutation.file).write_text(held, encoding="utf-8")


class PytestRun(NamedTuple):
    """What became of a run of tests.

    Attributes:
      code: 0 if all passed, 1 if one failed, 2 if one could not be imported, 5 if all
        of them are slow ones; None: the time was over, and the process was killed.
      seconds: of processor time.
    """

    code: int | None
    seconds: float


def run_tests(
    words: list[str],
    root: Path,
    *,
    seconds: float,
    marks: str = "not slow",
    any_end: bool = False,
) -> PytestRun:
    """Runs pytest on a copy of the tree, in a fork: what is imported here stays so.

    Args:
      words: for pytest.
      root: of the copy.
      seconds: of processor time that it may take; waiting, ten times as many.
      marks: of the tests, as pytest's -m takes them; by default those that every
        change runs.
      any_end: returns the code of a pytest that could not run or was killed, too.

    Raises:
      SystemExit: pytest itself failed.
    """
    output = root / "mutation.out"
    child = os.fork()
    if child == 0:
        os.setsid()
        # A clock would count what else the machine does.
        limit = math.ceil(seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        _test(["-m", marks, *words], root, output)
    code, taken = _end_of(child, 10 * seconds)
    if code not in (0, 1, 2, 5, None) and not any_end:
        raise SystemExit(f"pytest {words}: {output.read_text()[-2000:]}")
    return PytestRun(code, taken)


def _test(words: list[str], root: Path, output: Path) -> None:
    """Ends this process with what pytest says of the tree `root`."""
    code = 3
    try:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(root)
        sys.path = [str(root), *(p for p in sys.path if Path(p or ".") != ROOT)]
        sys.dont_write_bytecode = True
        settings = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ |= settings
        ours = ("recurjax", "pallas_kernels", "experiments", "tests")
        for name in [name for name in sys.modules if name.split(".")[0] in ours]:
            del sys.modules[name]
        fixed = ["-x", "-q", "-p", "no:cacheprovider"]
        fixed += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported here
        code = int(pytest.main([*fixed, *words]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_of(child: int, seconds: float) -> tuple[int | None, float]:
    """Returns a process' exit code and processor time; None: its time was over."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            over = code in (-signal.SIGXCPU, -signal.SIGKILL)
            return None if over else code, usage.ru_utime + usage.ru_stime
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, seconds


def _words(tests: str) -> list[str]:
    """Splits words for pytest; what follows -k is one."""
    places, key, expression = tests.partition(" -k ")
    return [*places.split(), *(["-k", expression.strip("'")] if key else [])]


def copy_tree(to: Path) -> None:
    """Copies what git would: tracked files and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def main(options: Options) -> int:
    """Runs what has no answer yet."""
    for name in ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "chex"):
        import_module(name)
    answers: dict[str, bool] = {}
    if options.into.is_file():
        answers = json.loads(options.into.read_text(encoding="utf-8"))
    wanted = [
        item for item in mutations() if options.only in f"{item.name} {item.tests}"
    ]
    left = [item for item in wanted if item.name not in answers][: options.most]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy_tree(Path(folder))
        for mutation in left:
            answers[mutation.name] = is_found(mutation, Path(folder), options.seconds)
            message = "found    " if answers[mutation.name] else "NOT FOUND"
            print(f"{message} {mutation.name}", flush=True)
            write_atomic(options.into, json.dumps(answers, indent=1) + "\n")
    known = [answers[item.name] for item in wanted if item.name in answers]
    print(f"{sum(known)} of {len(known)} found, {len(wanted) - len(known)} not run")
    return int(sum(known) < 0.95 * len(known))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
