"""The scripts that measure, at their smallest."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from recurjax.errors import UserError

FOLDER = Path(__file__).parents[2] / "experiments" / "recurrent_transformer"


@pytest.fixture
def script(unoptimized, monkeypatch):
    """Returns a script's module, its programs compiled quickly."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    return importlib.import_module


def test_the_cache_shrinks_by_the_root_of_the_depth(script):
    """Keys and values of D numbers a layer, in bfloat16, for both models."""
    rows = script("cache_footprint").table().splitlines()[2:]
    cells = {row.split(" | ")[0][2:]: row.split(" | ")[1:] for row in rows}
    for name, layers, width in (
        ("c4_300m_transformer_12", 12, 1408),
        ("c4_300m_recurrent_12", 12, 1408),
        ("c4_300m_recurrent_6", 6, 2048),
        ("c4_150m_recurrent_6", 6, 1408),
    ):
        assert cells[name][:3] == [str(layers), str(width), f"{4 * layers * width:,}"]
    assert float(cells["c4_300m_recurrent_6"][3]) == pytest.approx(0.5**0.5, abs=0.03)


@pytest.mark.slow
def test_scaling_writes_a_table_and_a_picture(script, tmp_path):
    words = ["--lengths", "128", "256", "--schedules", "prefix", "--repeats", "1"]
    words += ["--batch", "1", "--width", "32", "--heads", "2"]
    points = script("scaling").main(["--out", str(tmp_path), *words])
    assert [point.length for point in points] == [128, 256]
    result = json.loads((tmp_path / "scaling.json").read_text())
    assert result["points"] and result["shape"] == {"B": 1, "D": 32, "H": 2}
    assert "| 256 |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_the_grid_is_the_papers(script):
    grid = script("c4_grid")
    runs = grid.grid(grid.Options(run="c4_150m_recurrent_12"))
    pairs = [(run.optimizer.learning_rate, run.optimizer.b2) for run in runs]
    assert pairs == [(rate, b2) for rate in (1e-3, 3e-3, 1e-2) for b2 in (0.95, 0.99)]
    assert len({run.name for run in runs}) == 6
    with pytest.raises(UserError, match="did you mean c4_150m_recurrent_12"):
        grid.grid(grid.Options(run="c4_150m_recurrent_13"))


@pytest.mark.slow
def test_the_block_in_torch_gives_our_output(script, capsys):
    pytest.importorskip("torch", reason="the test extra torch is not installed")
    sizes = ["--length", "9", "--width", "8", "--heads", "2", "--batch", "1"]
    few = ["--turns", "1", "--repeats", "1", "--threads", "1"]
    words = ["--torch-python", sys.executable, *sizes, *few]
    assert script("torch_block").main(words) == 0
    said = capsys.readouterr()
    assert float(said.err.split("apart by ")[1].split()[0]) < 1e-5
    assert "| PyTorch, SDPA |" in said.out and "| our Transformer |" in said.out


def test_the_authors_layer_is_told_beside_ours(script, monkeypatch, tmp_path, capsys):
    """Theirs in a process of its own, from the checkout: eager, then compiled."""
    torch_block = script("torch_block")
    asked = []

    def ask(python, file, arrays, **given):
        asked.append((file.name, given["environment"]))
        weights = np.load(arrays).files
        assert ("slopes" in weights) and ("mlp.w_up" in weights), weights
        assert file.is_file()
        return {"difference": 0.0, "forward": 1e9, "forward_backward": 2e9}

    monkeypatch.setattr(torch_block, "ask", ask)
    (tmp_path / "olmo").mkdir()
    words = ["--length", "8", "--width", "8", "--heads", "2", "--batch", "1"]
    words += ["--turns", "1", "--repeats", "1", "--torch-python", "python"]
    assert torch_block.main([*words, "--authors", str(tmp_path)]) == 0
    path = {"PYTHONPATH": str(tmp_path)}
    assert asked == [
        ("torch_block_sdpa.py", {}),
        ("torch_block_authors.py", path | {"TORCHDYNAMO_DISABLE": "1"}),
        ("torch_block_authors.py", path),
    ]
    rows = capsys.readouterr().out.splitlines()[2:]
    names = ["PyTorch, SDPA", "our Transformer", "the authors' tiled layer, eager"]
    names += ["the same, compiled", "our layer"]
    assert [row.split(" | ")[0][2:] for row in rows] == names
    assert rows[1].count("(1.00)") == rows[4].count("(1.00)") == 2
    with pytest.raises(UserError, match="is no checkout of the paper's code"):
        torch_block.main([*words, "--authors", str(tmp_path / "olmo")])
