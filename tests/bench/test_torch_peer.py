"""Calls of PyTorch in another interpreter."""

import os
import sys

import pytest

from recurjax.bench.torch_peer import answer_of
from recurjax.errors import UserError


def test_a_comparison_with_torch_needs_an_interpreter_that_has_it(tmp_path):
    """Here one that has no packages at all, as far as it knows."""
    script = tmp_path / "script.py"
    script.write_text("import numpy")
    with pytest.raises(UserError, match="--torch-python: .*no-such-python"):
        answer_of("no-such-python", script)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match="/python failed: ModuleNotFoundError"):
        answer_of(str(bare), script)


def test_a_peer_gets_variables_of_its_own(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps(os.environ['A_PEER_S']))")
    monkeypatch.delenv("A_PEER_S", raising=False)
    given = {"A_PEER_S": "checkout"}
    assert answer_of(sys.executable, script, environment=given) == "checkout"
    assert "A_PEER_S" not in os.environ
