"""The scripts that measure, at their smallest."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from recurjax.errors import UserError

FOLDER = Path(__file__).parents[2] / "experiments" / "recurrent_transformer"


@pytest.fixture
def script(quick_compilation, monkeypatch):
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
