"""Runs the steps of a JSON file in one process, as a reader types them one by one.

    python -m tests.documents.session steps.json

One process, because jax takes seconds to start and a command is a function.
"""

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

from recurjax.cli.main import main

BEGAN = Path.cwd()


def run(step: dict) -> None:
    """Runs a command's words or the text of a Python block, or starts a guide.

    A guide gets a copy of the folder in which the session began, with what the steps
    before the first guide made.
    """
    if "guide" in step:
        folder = BEGAN.with_name(step["guide"])
        shutil.copytree(BEGAN, folder)
        os.chdir(folder)
        return
    if "words" in step:
        assert step["words"][0] == "recurjax", step
        sys.stdin = io.StringIO("")  # a chat ends at once
        code = main(step["words"][1:])
        if code != 0:
            sys.exit(f"{step['place']}: exit code {code}: {' '.join(step['words'])}")
        return
    module = ModuleType("block")
    exec(compile(step["python"], step["place"], "exec"), module.__dict__)
    for left, right in step.get("equal", []):
        difference = abs(eval(f"{left} - {right}", module.__dict__)).max()
        assert difference < 1e-4, (step["place"], left, right, difference)


def session(file: Path) -> None:
    """Runs all steps and prints the seconds of each."""
    for step in json.loads(file.read_text()):
        began = time.monotonic()
        run(step)
        text = step.get("guide") or " ".join(step.get("words", ["python"]))
        seconds = time.monotonic() - began
        print(
            f"document: {seconds:5.1f} s  {step.get('place', '')}  {text}", flush=True
        )


if __name__ == "__main__":
    session(Path(sys.argv[1]))
