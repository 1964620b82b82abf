"""Asks PyTorch, in an interpreter that has it, how fast it is at the same task."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recurjax.errors import UserError

Times = dict[tuple[int, str, str], float]
"""(T, side or layer, pass): milliseconds."""

SIDE = Path(__file__).with_name("torch_side.py")
"""What runs there; also how another script there takes a time (`fastest`)."""


def ask(
    python: str,
    script: Path,
    arrays: Path,
    *,
    heads: int,
    threads: int,
    repeats: int,
    environment: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Runs a script's PyTorch module in a process of its own.

    Args:
      python: an interpreter that has torch and numpy.
      script: has the function `peer`, see `torch_side.py`.
      arrays: an npz file of what `peer` makes the module from.
      heads: for `peer`.
      threads: of torch.
      repeats: timed calls of each pass.
      environment: variables that the process gets beside ours.

    Returns:
      Milliseconds by pass, and the "difference": of its output from ours, the largest.

    Raises:
      UserError: the interpreter cannot be run, or has no torch.
    """
    question = {"arrays": str(arrays), "heads": heads}
    question |= {"threads": threads, "repeats": repeats}
    return answer_of(
        *(python, SIDE, str(script), json.dumps(question)), environment=environment
    )


def best_of_turns(
    theirs: str,
    case: Callable[[int], Mapping[str, Any]],
    ours: Callable[[int], Times],
    *,
    lengths: Sequence[int],
    turns: int,
    **request: Any,
) -> Times:
    """Times both sides, one after the other in each turn; the fastest of all turns.

    Tells at each turn how far the outputs are apart.

    Args:
      theirs: what the other side is called in the result.
      case: of a length, the arrays that `peer` makes the module from.
      ours: of a length, our milliseconds.
      request: for `ask`.

    Raises:
      UserError: as `ask`.
    """
    best: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            arrays = Path(folder) / f"{length}.npz"
            np.savez(arrays, allow_pickle=False, **case(length))
            for _ in range(turns):
                answer = ask(arrays=arrays, **request)
                apart = answer.pop("difference")
                print(f"T {length}: y apart by {apart:.1e}", flush=True)
                times = {(length, theirs, what): ms for what, ms in answer.items()}
                for key, ms in (times | ours(length)).items():
                    best[key] = min(ms, best.get(key, ms))
    return best


def answer_of(
    python: str,
    script: Path,
    *words: str,
    given: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Runs a script in that interpreter; returns the JSON of the last line it prints.

    Args:
      python: the interpreter.
      words: for the script's command line.
      given: for its standard input.
      environment: variables that it gets beside ours.

    Raises:
      UserError: the interpreter cannot be run, or the script failed.
    """
    command = [python, str(script), *words]
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, env=variables
        )
    except OSError as error:
        raise UserError(f"--torch-python: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"--torch-python: {python} failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])
