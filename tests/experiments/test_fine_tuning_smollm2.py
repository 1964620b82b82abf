"""The comparison of adapters with full training: what it resumes, and its table."""

import json

from experiments import fine_tuning_smollm2 as fine_tuning


def test_measured_runs_are_not_trained_again(tmp_path, monkeypatch, capsys):
    trained = []

    def measured(words):
        side, _, seed = words[-1].partition(":")
        trained.append((side, int(seed)))
        return row(*trained[-1], held_out=1.01)

    def row(side, seed, held_out=1.0):
        peak = 2.0 if side == "adapters" else 6.0
        return {"side": side, "seed": seed, "held_out": held_out, "peak_gb": peak}

    (tmp_path / "chats.jsonl").touch()
    done = [row(side, seed) for seed in (0, 1) for side in fine_tuning.SIDES][:3]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in done))
    monkeypatch.setattr(fine_tuning, "measured", measured)
    words = ["runs/base", "--out", str(tmp_path), "--seeds", "0", "1"]
    assert fine_tuning.main(words) == 0
    assert trained == [("adapters", 1)]
    assert "| 1 | 1.000 | 1.010 | 1.010 | 6.00 | 2.00 |" in capsys.readouterr().out
    assert fine_tuning.main(words) == 0
    assert len(trained) == 1
