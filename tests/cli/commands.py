"""Running `recurjax` in this process."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from recurjax.cli.main import main
from tests.training import tiny_experiment

TINY = tiny_experiment.__file__


def recurjax(*words):
    """Returns exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def without_progress(err: str) -> str:
    """Drops the lines that tell, now and then, how far a slow machine is."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(" items/s\n"))


def assert_refused(answer, pattern):
    """Exit code 2 and one sentence."""
    code, _, err = answer
    assert (code, err.count("\n"), err[:10]) == (2, 1, "recurjax: "), answer
    assert re.search(pattern, err), err


def experiment_file(folder: Path, body: str) -> Path:
    """Writes an experiment: the tiny one, changed by the `body` of a function."""
    file = folder / "experiment.py"
    file.write_text(
        "from recurjax.data.config import *\n"
        "from tests.training.tiny_experiment import changed, config as tiny\n"
        f"def config():\n    {body}\n"
    )
    return file
