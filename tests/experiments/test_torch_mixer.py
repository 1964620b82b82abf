"""transformers' Mamba mixer beside ours, in an interpreter that has it."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]

FOLDER = Path(__file__).parents[2] / "experiments" / "recurformer"


def test_transformers_mixer_gives_our_output(unoptimized, monkeypatch, capsys):
    python = os.environ.get("RECURJAX_TORCH_PYTHON")
    if python is None:
        pytest.skip("RECURJAX_TORCH_PYTHON names no interpreter with transformers")
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    torch_mixer = importlib.import_module("torch_mixer")
    few = ["--lengths", "9", "--width", "8", "--turns", "1", "--repeats", "1"]
    assert torch_mixer.main(["--torch-python", python, *few]) == 0
    said = capsys.readouterr().out
    assert float(said.split("apart by ")[1].split()[0]) < 1e-5
    assert "| transformers |" in said and "| recurjax |" in said
