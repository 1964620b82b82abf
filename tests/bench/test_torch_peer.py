"""What PyTorch is asked in another interpreter."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from recurjax.bench.torch_peer import answer_of, ask
from recurjax.errors import UserError

FEW = {"heads": 2, "threads": 1, "repeats": 1}
PEER = """
import torch

def peer(arrays, heads):
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.weight = torch.nn.Parameter(arrays["w"])
    return layer, arrays["x"], arrays["y"], torch.sum, {"decode": lambda: heads}
"""


def test_a_comparison_with_torch_needs_an_interpreter_that_has_it(tmp_path):
    """Here one that has no packages at all, as far as it knows."""
    nothing = Path("nothing")
    with pytest.raises(UserError, match="--torch-python: .*no-such-python"):
        ask("no-such-python", nothing, nothing, **FEW)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match="/python failed: ModuleNotFoundError"):
        ask(str(bare), nothing, nothing, **FEW)


@pytest.mark.slow
def test_a_module_in_torch_is_compared_and_timed(tmp_path):
    python = os.environ.get("RECURJAX_TORCH_PYTHON")
    if python is None:
        pytest.skip("RECURJAX_TORCH_PYTHON names no interpreter that has torch")
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(4, 3)), draw.normal(size=(2, 3))
    script, arrays = tmp_path / "script.py", tmp_path / "arrays.npz"
    script.write_text(PEER)
    np.savez(arrays, x=x, w=w, y=x @ w.T + 0.25)
    answer = ask(python, script, arrays, **FEW)
    assert answer.pop("difference") == pytest.approx(0.25)
    assert set(answer) == {"forward", "decode", "forward_backward"}
    assert min(answer.values()) > 0


def test_a_peer_gets_variables_of_its_own(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps(os.environ['A_PEER_S']))")
    monkeypatch.delenv("A_PEER_S", raising=False)
    given = {"A_PEER_S": "checkout"}
    assert answer_of(sys.executable, script, environment=given) == "checkout"
    assert "A_PEER_S" not in os.environ
