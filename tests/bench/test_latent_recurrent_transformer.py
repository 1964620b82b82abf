"""The latent recurrence's bench: the promised rows, and a summary of them."""

import pytest

from recurjax.bench import latent_recurrent_transformer as bench
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]


@pytest.mark.sweep
def test_every_schedule_and_pass_has_a_row(unoptimized, monkeypatch):
    sizes = {"B": 1, "T": 8, "D": 8, "L": 1, "V": 8}
    monkeypatch.setattr(bench, "SMALL", sizes)
    monkeypatch.setattr(bench, "SUBSETS", (2,))
    rows = list(bench.rows(large=False, dtype="float32", repeats=1))
    steps = ("base", "shared_s2", "layerwise_s2")
    wanted = [
        f"latent_recurrent_transformer/{name}/{what}"
        for name in steps
        for what in ("forward_backward", "train_step")
    ]
    for kind in ("base", "shared", "layerwise"):
        wanted.append(f"latent_recurrent_transformer/{kind}/prefill")
        if kind == "shared":
            wanted.append("latent_recurrent_transformer/shared_sweeps4/prefill")
        wanted.append(f"latent_recurrent_transformer/{kind}/decode")
    assert [row.name for row in rows] == wanted
    assert all(row.min_ms > 0 for row in rows)
    summary = bench.summary(rows)
    assert "forward and backward over the baseline's, S = 2" in summary
    assert "a training step with its optimizer, S = 2" in summary
