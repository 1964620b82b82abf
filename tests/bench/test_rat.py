"""RAT's bench: the promised rows, and a summary of them."""

import pytest

from recurjax.bench import rat
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]


@pytest.mark.slow  # Fifteen programs to compile.
def test_every_layer_and_pass_has_a_row(unoptimized, monkeypatch):
    monkeypatch.setattr(rat, "SMALL", {"B": 1, "D": 8, "H": 2})
    monkeypatch.setattr(rat, "SMALL_LENGTHS", (32,))
    rows = list(rat.rows(large=False, dtype="float32", repeats=1))
    layers = ("rnn", "rat16", "rat64", "attention", "swa")
    passes = ("forward", "forward_backward", "decode")
    wanted = [f"rat/{layer}/{what}" for layer in layers for what in passes]
    assert [row.name for row in rows] == wanted
    assert all(row.min_ms > 0 for row in rows)
    said = rat.summary(rows)
    assert "attention's time over RAT(16)'s at T 32" in said
    assert "attention 64.0 B" in said  # keys and values of 8 float32 channels
