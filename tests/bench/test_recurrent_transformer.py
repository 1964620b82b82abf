"""The Recurrent Transformer's bench: the promised rows, and a summary of them."""

import pytest

from recurjax.bench import recurrent_transformer as bench
from recurjax.bench.timing import row
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]

PASSES = ("forward", "forward_backward", "decode")
LAYERS = (
    *("naive", "prefix", "wavefront"),
    *("block4", "block16", "block64", "transformer"),
)


def test_every_promised_layer_is_there():
    for shape in (*bench.SMALL, *bench.LARGE):
        assert tuple(bench.layers(shape)) == LAYERS


@pytest.mark.slow  # Six programs to compile.
def test_every_pass_of_a_layer_has_a_row(unoptimized, monkeypatch):
    shape = {"B": 1, "T": 16, "D": 8, "H": 2}
    some = {name: bench.layers(shape)[name] for name in ("prefix", "transformer")}
    monkeypatch.setattr(bench, "SMALL", (shape,))
    monkeypatch.setattr(bench, "layers", lambda shape: some)
    rows = list(bench.rows(large=False, dtype="float32", repeats=1))
    names = [row.name for row in rows]
    assert names == [
        f"recurrent_transformer/{layer}/{what}" for layer in some for what in PASSES
    ]
    assert all(row.min_ms > 0 for row in rows)


def test_the_summary_compares_with_naive_and_with_the_transformer():
    shape = bench.SMALL[1]
    rows = [
        row(f"recurrent_transformer/{name}/{what}", shape, "float32", [s], tokens=1)
        for name, s in (("naive", 8.0), ("prefix", 1.0), ("wavefront", 2.0))
        for what in PASSES[:2]
    ]
    one = {"B": 8, "T": 1, "S": 1024}
    rows += [
        row(f"recurrent_transformer/{name}/decode", one, "float32", [s], tokens=1)
        for name, s in (("prefix", 3.0), ("transformer", 2.0))
    ]
    summary = bench.summary(rows)
    assert "a decoded token over the Transformer layer's: 1.50 at 1024" in summary
    assert "T 1024: prefix 8.0, wavefront 4.0" in summary
