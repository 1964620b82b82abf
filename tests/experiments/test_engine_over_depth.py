"""Engines of a looped block on one queue: a row per policy, with its ratios."""

import numpy as np
import pytest

from experiments.relaxed_recursive_transformer import engine_over_depth as bench
from recurjax.inference.engine.slots import SequenceWise
from recurjax.types import Tokens
from tests.variants.transformer.switches import build

SIZES = {"B": 2, "T": 4, "D": 8, "L": 3, "R": 3, "V": 257, "steps": 1}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "SMALL", SIZES)
    monkeypatch.setattr(bench, "LEAST", 2)
    monkeypatch.setattr(bench, "MOST", 6)


@pytest.mark.sweep  # Six engines and three models to compile.
def test_every_policy_has_a_row(quick_compilation, tiny):
    rows = list(bench.rows(bench.Options(repeats=1, requests=3)))
    names = [f"relaxed_recursive_transformer/engine_{p}/serve" for p in bench.POLICIES]
    assert [row.name for row in rows] == names
    figures = {p: row.figures for p, row in zip(bench.POLICIES, rows, strict=True)}
    for policy, f in figures.items():
        assert min(f["step_ms"], f["pass_ms"], f["head_ms"], f["bits_a_byte"]) > 0
        assert (f["missing_ms"] > 0) == (policy == "propagate")
        assert f["of_bound"] == pytest.approx(f["speedup"] / f["bound"])
        assert 1 <= f["loops"] <= 3 and f["paper"] == pytest.approx(3 / f["loops"])
        # A token cannot cost less than the loops that made it, nor a lane's share.
        lanes = 3 if policy == "verify" else 1
        assert f["rows_a_token"] >= f["loops"] * lanes - 1e-9
    assert figures["verify"]["bits_a_byte"] == figures["sequence"]["bits_a_byte"]
    assert figures["sequence"]["speedup"] == 1 == figures["sequence"]["bound"]
    outputs = {row.tokens_per_s * row.median_ms for row in rows}
    assert max(outputs) - min(outputs) < 1e-6 * max(
        outputs
    )  # the same tokens in each queue
    summary = bench.summary(rows)
    assert (
        summary.splitlines()[3].startswith("propagate: ") and "bits per byte" in summary
    )


def test_bits_of_a_given_text_are_those_of_the_whole_rows(quick_compilation, tiny):
    config = bench._model(bench.stacks(SIZES)[2], SIZES, "float32")
    model = build(config)
    length = SIZES["T"] + 6
    text = np.random.default_rng(0).integers(0, 257, 2 * length).astype(np.int32)
    bits = bench.held_out_bits(model, SequenceWise(), text, SIZES)
    rows = text.reshape(2, length)
    logits, _ = model(Tokens(rows[:, :-1]), model.init_cache(2, 0))
    logits = np.asarray(logits, np.float64)
    sums = np.log(np.exp(logits).sum(-1))
    own = np.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0]
    assert bits == pytest.approx((sums - own).mean() / np.log(2), rel=1e-5)


def test_a_queue_is_drawn_once_and_fits_the_slots():
    text = np.arange(300, dtype=np.int32)
    queue = bench.draw_queue(bench.SMALL, text, 20)
    again = bench.draw_queue(bench.SMALL, text, 20)
    for first, other in zip(queue, again, strict=True):
        assert first.settings == other.settings
        np.testing.assert_array_equal(first.prompt, other.prompt)
        assert len(first.prompt) == bench.SMALL["T"]
        assert 16 <= first.settings.max_new_tokens <= 256
