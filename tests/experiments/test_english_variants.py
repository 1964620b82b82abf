"""The six variants on a text: of one size, and a set that trains, resumes and draws."""

import importlib
import sys
from pathlib import Path
from typing import get_args

import pytest

from recurjax.model import count_parameters

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def english(quick_compilation, monkeypatch):
    """Imports the script as Python would run it."""
    monkeypatch.setattr("sys.path", [str(FOLDER), *sys.path])
    yield importlib.import_module("english_variants")
    sys.modules.pop("english_variants", None)


def test_the_variants_are_of_one_size(english):
    names = get_args(english.Name)
    sizes = [count_parameters(english.model(name)).total for name in names]
    assert len(names) == 6 and max(sizes) / min(sizes) < 1.005


@pytest.mark.sweep
def test_a_small_set_trains_and_draws_its_curves(english, tmp_path, capsys):
    text = tmp_path / "english.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 3000)
    words = [str(text), "--runs", str(tmp_path / "runs"), "--tokens", "8192"]
    words += ["--variants", "transformer", "rrt", "--seeds", "1"]
    assert english.main(words) == 0
    table = capsys.readouterr().out
    assert "| transformer | 853,120 | 8,192 |" in table and "| rrt |" in table
    png = tmp_path / "runs" / "english.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    png.unlink()
    log = (tmp_path / "runs" / "rrt" / "log").read_text()
    assert english.main(words) == 0 and png.is_file()
    # Resumed at its end, it trains no step again.
    again = (tmp_path / "runs" / "rrt" / "log").read_text().removeprefix(log)
    assert "resuming at step 2 of 2" in again and "loss" not in again
