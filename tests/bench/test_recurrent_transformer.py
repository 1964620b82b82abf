"""The Recurrent Transformer's bench: the promised rows, and a summary of them."""

import pytest

from recurjax.bench import recurrent_transformer as bench


@pytest.mark.slow  # Some twenty programs to compile.
def test_every_schedule_and_pass_has_a_row(monkeypatch):
    monkeypatch.setattr(bench, "SMALL", ({"B": 1, "T": 64, "D": 8, "H": 2},))
    rows = list(bench.rows(large=False, dtype="float32", repeats=1))
    schedules = ("naive", "tiled", "prefix", "wavefront")
    layers = (*schedules, "block4", "block16", "block64", "transformer")
    names = {row.name for row in rows}
    for layer in layers:
        for what in ("forward", "forward_backward"):
            assert f"recurrent_transformer/{layer}/{what}" in names
    assert any(name.endswith("/decode") for name in names)
    assert "tiled against naive" in bench.summary(rows)
