"""RecurFormer's bench: the promised rows, and a summary of them."""

from recurjax.bench import recurformer
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]


def test_the_scan_has_a_row_for_every_backend_and_pass(unoptimized, monkeypatch):
    monkeypatch.setattr(recurformer, "SMALL", {"B": 1, "I": 8, "N": 4})
    monkeypatch.setattr(recurformer, "SMALL_LENGTHS", (32,))
    monkeypatch.setattr(recurformer, "REFERENCE_UP_TO", 16)
    rows = list(recurformer.rows(large=False, dtype="float32", repeats=1))
    wanted = ["xla/forward", "xla/forward_backward", "reference/decode", "xla/decode"]
    assert [row.name for row in rows] == [f"selective_scan/{one}" for one in wanted]
    assert all(row.min_ms > 0 for row in rows)
    said = recurformer.summary(rows)
    assert "the reference's time over selective_scan/xla/decode at T 1" in said
