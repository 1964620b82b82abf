"""The first run on a GPU, dry-run on a CPU: every step measures something."""

import json

import pytest

from experiments import first_gpu

STEPS = [step for step in first_gpu.STEPS if step != "hopper"]
"""tests/experiments/test_hopper.py runs the persistent kernel's script."""


@pytest.mark.slow
def test_every_step_writes_rows_as_it_measures(quick_children, tmp_path, capsys):
    assert first_gpu.main(["--tiny", "--out", str(tmp_path), *STEPS]) == 0
    said = capsys.readouterr().out
    assert all(f"{step}: " in said for step in STEPS) and " 0 failed" in said
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["step"] for row in rows} == set(STEPS)
    [error] = [row["error"] for row in rows if row["step"] == "right"]
    assert 0 <= error < 1e-4
    timed = [row for row in rows if "best_ms" in row]
    assert len(timed) > 10 and all(row["best_ms"] > 0 for row in timed)
    failed = [row for row in rows if row["step"] == "scans" and "error" in row]
    absent = {"torch", "packed/tokamax"}  # not installed everywhere
    assert {row["name"] for row in failed} <= absent
    gaps = {row["name"]: row["gradient_gap"] for row in rows if "gradient_gap" in row}
    assert gaps["packed/cudnn"] < 1e-4


def test_a_process_that_fails_is_shown_and_counted(tmp_path, capsys, monkeypatch):
    broken = first_gpu.Process(words=("probe", "no argument"), seconds=60)
    monkeypatch.setattr(first_gpu, "processes", lambda step, tiny: [broken])
    assert first_gpu.main(["--tiny", "--out", str(tmp_path), "probe"]) == 1
    said = capsys.readouterr().out
    assert "TypeError" in said and "1 failed" in said


def test_a_spent_budget_starts_nothing(tmp_path, capsys):
    assert first_gpu.main(["--seconds", "1", "--out", str(tmp_path), "probe"]) == 1
    assert "probe: not started" in capsys.readouterr().out


def test_an_unknown_step_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        first_gpu.main(["--out", str(tmp_path), "profil"])
    assert "no step 'profil'" in capsys.readouterr().err
