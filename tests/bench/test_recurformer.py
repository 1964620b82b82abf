"""RecurFormer's bench: the promised rows, and a summary of them."""

import pytest

from recurjax.bench import recurformer
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]


def test_the_promised_rows_are_there(unoptimized, monkeypatch):
    monkeypatch.setattr(recurformer, "SMALL", {"B": 1, "I": 8, "N": 4})
    monkeypatch.setattr(recurformer, "SMALL_LENGTHS", (32,))
    monkeypatch.setattr(recurformer, "REFERENCE_UP_TO", 16)
    monkeypatch.setattr(recurformer, "SMALL_LAYER", {"B": 1, "D": 8, "H": 2})
    monkeypatch.setattr(recurformer, "SMALL_LAYER_LENGTHS", (16,))
    monkeypatch.setattr(recurformer, "MIXER_LENGTHS", (8,))
    monkeypatch.setattr(recurformer, "BETAS", (0.0, 0.5))
    rows = list(recurformer.rows(large=False, dtype="float32", repeats=1))
    both = ("forward", "forward_backward")
    scans = ["xla/forward", "xla/forward_backward", "reference/decode", "xla/decode"]
    wanted = [f"selective_scan/{scan}" for scan in scans]
    wanted += [f"mamba/{item}" for item in both]
    for layer in ("attention", "beta_50"):
        wanted += [f"layer/{layer}/{one}" for one in (*both, "decode")]
    assert [row.name for row in rows] == wanted
    assert all(row.min_ms > 0 for row in rows)
    # One call of a scan's decode step reads a token of each row.
    for row in rows:
        tokens = row.shape["B"] * (1 if "decode" in row.name else row.shape["T"])
        assert row.tokens_per_s == pytest.approx(1e3 * tokens / row.median_ms)
    # 2 K E T 4 bytes of keys and values; of Mamba 2 n E (4 + 16) 4 of each channel.
    kept = {row.name: row.shape["bytes"] for row in rows if "bytes" in row.shape}
    assert kept["layer/attention/decode"] == 2 * 8 * 16 * 4
    assert kept["layer/beta_50/decode"] == 2 * 4 * 16 * 4 + 8 * 20 * 4
    # Four matrices of 8 by 8, and the logits and sums over 16 tokens.
    attention, half = (
        next(row.shape for row in rows if row.name == f"layer/{name}/decode")
        for name in ("attention", "beta_50")
    )
    assert attention["parameters"] == 4 * 8 * 8
    assert attention["flops"] == 6 * 4 * 8 * 8 + 12 * 8 * 16
    # Half the queries and keys went; a mixer of width 4, 8 channels, rank 16 came.
    weights = 3 * 4 * 8 + 8 * (2 * 16 + 2 * 16) + 4 * 8
    assert half["parameters"] == 3 * 8 * 8 + weights + 8 * (3 + 16)
    scan = 27 * 8 * 16
    assert half["flops"] == 6 * (3 * 8 * 8 + weights) + 12 * 4 * 16 + scan
    said = recurformer.summary(rows)
    assert "the reference's time over selective_scan/xla/decode at T 1" in said
    assert "attention's time over layer/beta_50/forward at 16" in said
