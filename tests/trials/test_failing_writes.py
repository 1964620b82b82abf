"""A fault at a few of the writes of `data prepare`, in two pieces."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from tests.trials.failing_writes import _is_between

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="needs Linux and a C compiler",
)


def test_what_is_on_the_way_is_neither_lost_nor_wrong():
    old, new = [], [{"number": 0}, {"number": 1}]
    assert _is_between(new[1:], old, new) and _is_between([], old, new)
    assert not _is_between([{"number": 2}], old, new)
    assert not _is_between("traceback: no", None, {"a": "b"})
    assert not _is_between({"a": "c"}, None, {"a": "b"})
    assert _is_between([2, {}, [], [1]], None, [4, {}, [], [1, 2]])
    assert not _is_between([2, {}, [], [3]], None, [4, {}, [], [1, 2]])


def tried(into: Path, most: int) -> str:
    script = "tests/trials/failing_writes.py"
    words = [sys.executable, script, "--commands", "prepare", "--into", str(into)]
    done = subprocess.run(
        [*words, "--most", str(most)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.mark.sweep
def test_a_fault_at_a_write_loses_nothing_and_a_stopped_night_goes_on(tmp_path):
    into = tmp_path / "faults.json"
    assert tried(into, 3).startswith("prepare: 3 of 3 faults lose nothing, ")
    assert tried(into, 1).startswith("prepare: 4 of 4 faults lose nothing, ")
    assert len(json.loads(into.read_text())["prepare"]["lost"]) == 4
