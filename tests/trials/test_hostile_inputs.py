"""A hundred hostile inputs: no traceback, no wrong answer, no hang, no death.

In a process of its own, from which each case is forked before jax has a device.
"""

import subprocess
import sys

from tests.source_tree import ROOT


def test_a_hundred_hostile_inputs_are_read_or_refused():
    words = [sys.executable, "tests/trials/hostile_inputs.py", "--cases", "100"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("all "))
    right, refused, *bad = map(int, row.split()[1:])
    assert right + refused == 100 and min(right, refused) > 10, done.stdout
    assert bad == [0, 0, 0, 0]
