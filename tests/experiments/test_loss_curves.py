"""Several runs' losses in one picture."""

from dataclasses import replace

import pytest

from experiments import loss_curves
from recurjax.errors import UserError
from recurjax.experiment import write_experiment
from recurjax.files.json_files import json_text
from tests.training.tiny_experiment import config as tiny


def test_several_runs_are_drawn_and_told_by_tokens(tmp_path, capsys):
    each = tiny().training.tokens_per_step
    for name, last in (("a", 2.5), ("b", 1.25)):
        (tmp_path / name).mkdir()
        write_experiment(replace(tiny(), name=name), tmp_path / name / "config.json")
        rows = [
            {"kind": "train", "step": 1, "loss": 4.0},
            {"kind": "train", "step": 2, "loss": 2.0},
            {"kind": "validation", "step": 2, "loss": last},
        ]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json_text(row) + "\n" for row in rows)
        )
    runs, png = [str(tmp_path / name) for name in "ab"], tmp_path / "x.png"
    assert loss_curves.main([*runs, "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"| a | {2 * each:,} | 2.5000 |",
        f"| b | {2 * each:,} | 1.2500 |",
    ]
    words = [runs[0], "--png", str(png), "--kind", "train", "--log"]
    assert loss_curves.main(words) == 0
    assert capsys.readouterr().out.splitlines()[2] == f"| a | {2 * each:,} | 3.0000 |"
    with pytest.raises(UserError, match="--metric exit_1: no validation row"):
        loss_curves.main([*runs, "--png", str(png), "--metric", "exit_1"])
