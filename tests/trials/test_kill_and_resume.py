import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trials.kill_and_resume import contents, difference

SCRIPT = Path(__file__).with_name("kill_and_resume.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of a kill in a save, and what was printed."""
    root = tmp_path_factory.mktemp("kills")
    words = ["--kills", "1", "--directory", str(root)]
    # Each of the three processes compiles for itself, as a user's does; only not well.
    done = subprocess.run(
        [sys.executable, SCRIPT, *words],
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    return root, done


@pytest.mark.sweep
def test_a_run_killed_at_any_moment_and_resumed_ends_with_the_same_bits(runs):
    _, done = runs
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    assert lines[1].startswith("kill  1 in a save, ")
    assert "resuming at step" in lines[1] and "; bit-identical (" in lines[1]
    assert lines[2:] == ["1 of 1 ended bit-identical"]


@pytest.mark.sweep
def test_one_changed_number_is_found(runs, tmp_path):
    root, _ = runs
    want = contents(root / "whole")
    copy = Path(shutil.copytree(root / "killed-1", tmp_path / "copy"))
    assert difference(contents(copy), want) == ""
    rows = [
        json.loads(row) for row in (copy / "metrics.jsonl").read_text().splitlines()
    ]
    rows[5]["loss"] += 1e-7
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (copy / "metrics.jsonl").write_text(text)
    assert difference(contents(copy), want) == "metrics"
    name, array = next(iter(want.arrays.items()))
    flipped = want.arrays | {name: bytes([array[0] ^ 1]) + array[1:]}
    assert difference(want._replace(arrays=flipped), want) == name
