"""The benches of the ops: both passes by backend."""

from dataclasses import replace

import pytest

from recurjax.bench import ops, timing
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]

TINY = {
    "recurrent_prefill": {"B": 1, "T": 16, "D": 8, "H": 2},
    "chunk_attention": {"B": 1, "T": 8, "H": 2, "N": 1, "E": 4, "C": 2},
    "gated_scan": {"B": 1, "T": 8, "D": 8, "W": 4, "E": 2, "C": 4},
    "selective_scan": {"B": 1, "T": 16, "I": 4, "N": 2},
}


@pytest.mark.parametrize("op", TINY)
def test_every_backend_that_serves_has_both_passes(op, unoptimized):
    bench = replace(ops.BENCHES[op], small=(TINY[op],))
    rows = list(bench.rows(large=False, dtype="float32", repeats=1))
    assert [row.name for row in rows] == [f"{op}/xla/{what}" for what in ops.PASSES]
    assert rows[0].shape == TINY[op]
    assert bench.summary(rows) == ""


def test_the_fastest_backend_is_named_where_there_are_several():
    shape = TINY["recurrent_prefill"]
    rows = [
        timing.row(
            f"recurrent_prefill/{name}/forward_backward", shape, "f", [s], tokens=1
        )
        for name, s in (("triton", 0.002), ("xla", 0.001))
    ]
    summary = "B 1, T 16, D 8, H 2, both passes: xla 1.0 ms, triton 2.0 ms"
    assert ops.BENCHES["recurrent_prefill"].summary(rows) == summary
