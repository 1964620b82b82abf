"""The process that compiles does not outlive the one that asked."""

import subprocess
import sys

from tests.source_tree import ROOT

CHILD = """
import time
from recurjax.plan.child import end_with_parent
end_with_parent()
print("watching", flush=True)
time.sleep(20)
print("outlived", flush=True)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_killed_plan_takes_its_compiler_along():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "watching\n"
        parent.kill()
        # Both hold the pipe: it ends with the second.
        assert parent.stdout.read() == ""
