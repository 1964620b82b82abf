import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recurjax.errors import UserError

FOLDER = Path(__file__).parent


@pytest.fixture
def two_starts(monkeypatch):
    """Imports the script as Python would run it, with its neighbour."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    yield importlib.import_module("two_starts")
    for name in ("two_starts", "kill_and_resume"):
        sys.modules.pop(name, None)


def ended(said: str, code: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["/bin/sh", "-c", f'echo "{said}"; exit {code}'],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_only_a_refusal_that_names_the_first_is_right(two_starts):
    pid = os.getpid()
    right = f"recurjax: runs/x is in use by process {pid} on here since now: wait"
    assert two_starts.refusal(ended(right, 2), pid) == ""
    for said, code in ((right, 0), (right, -9 % 256), (right.replace("r", "R"), 2)):
        assert "THE SECOND ended with" in two_starts.refusal(ended(said, code), pid)
    assert "THE SECOND" in two_starts.refusal(ended(right, 2), pid + 1)
    with pytest.raises(UserError, match="--trials must be at least 1"):
        two_starts.Options(trials=0)
