"""The scripts that measure, at their smallest."""

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "recurrent_transformer"


@pytest.fixture
def script(unoptimized, monkeypatch):
    """Returns a script's module, its programs compiled quickly."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    return importlib.import_module


@pytest.mark.slow
def test_scaling_writes_a_table_and_a_picture(script, tmp_path):
    lengths = ["--lengths", "128", "256", "--schedules", "prefix"]
    points = script("scaling").main(
        ["--out", str(tmp_path), "--repeats", "1", *lengths]
    )
    assert [point.length for point in points] == [128, 256]
    assert json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert "| 256 |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_gpu_s_script_runs_at_its_smallest_here(script, tmp_path):
    out = tmp_path / "report.json"
    script("one_gpu").main(["--out", str(out), "--tiny", "--repeats", "1"])
    report = json.loads(out.read_text())
    assert 0 < report["errors"]["float32/prefix"] < 1e-4
    assert all(row["recurrent_ms"] > 0 for row in report["layer_forward"])
    assert report["training_ratio"] > 0
