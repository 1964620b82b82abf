"""Runs scripts in an interpreter that has PyTorch."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurjax.errors import UserError


def answer_of(
    python: str,
    script: Path,
    *words: str,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Runs a script in that interpreter; returns the JSON of the last line it prints.

    Args:
      python: the interpreter.
      words: for the script's command line.
      stdin: for its standard input.
      environment: variables that it gets in addition to ours.

    Raises:
      UserError: the interpreter cannot be run, or the script failed.
    """
    command = [python, str(script), *words]
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=variables
        )
    except OSError as error:
        raise UserError(f"--torch-python: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"--torch-python: {python} failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])
