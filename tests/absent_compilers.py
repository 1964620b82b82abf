"""Compilers of GPUs and TPUs that are not present, for tests.

They run in processes of their own: their plugins would disturb one that runs on the
CPU. A process takes seconds to start and to open its compiler, so there is one for GPUs
and one for TPUs, which answer all questions until the tests end.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.plan.compilers import VARIABLE, environment
from recurjax.plan.topology import Topology, parse_topology
from tests.source_tree import ROOT

COMPILERS = Path(os.environ.get(VARIABLE) or ROOT / ".compilers")


class Compiler(NamedTuple):
    """A process that compiles, and the file of what it complains of."""

    process: subprocess.Popen[str]
    complaints: Path


_RUNNING: dict[str, Compiler] = {}  # by platform


def ask(target: str, question: str, *words: Any) -> Any:
    """Returns what `question`, "module:function", says to (target, *words) there.

    Args:
      target: "h100" or a TPU topology such as "v5e:2x2".
      question: of a module that the process imports; words and answer go as JSON.
    """
    topology = parse_topology(target)
    if topology.platform not in _RUNNING:
        _RUNNING[topology.platform] = _start(topology)
    process, _ = _RUNNING[topology.platform]
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([question, target, *words]) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:  # it raised, or its compiler took it down
        raise AssertionError(_end(_RUNNING.pop(topology.platform))[-4000:])
    return json.loads(line)


def _start(topology: Topology) -> Compiler:
    with tempfile.NamedTemporaryFile(prefix="compiler-", delete=False) as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.absent_compilers"],
            env=environment(topology),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    return Compiler(process, Path(file.name))


def _end(compiler: Compiler) -> str:
    """Waits for the end of a process and returns what it complained of."""
    process, complaints = compiler
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # it ends at the end of its questions
    process.stdout.close()
    process.wait()
    text = complaints.read_text()
    complaints.unlink()
    return text


@atexit.register
def _end_all() -> None:
    for compiler in _RUNNING.values():
        _end(compiler)


def _answer() -> None:
    """Answers each line of standard input with a line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers write there as well
    for line in sys.stdin:
        question, *words = json.loads(line)
        module, function = question.split(":")
        message = getattr(import_module(module), function)(*words)
        print(json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    _answer()
