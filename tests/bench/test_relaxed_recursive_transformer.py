"""The looped block's bench: the promised rows, and a summary of them."""

import pytest

from recurjax.bench import relaxed_recursive_transformer as bench
from recurjax.bench.timing import in_turns
from recurjax.model import ModelConfig, count_parameters
from tests.training.compilation import unoptimized

__all__ = ["unoptimized"]
NAME = "relaxed_recursive_transformer"


PASSES = ("forward", "forward_backward", "train_step", "distilled_step", "decode")
SIZES = {"B": 1, "T": 8, "D": 8, "L": 6, "V": 8}


@pytest.mark.sweep  # Two of the four models: each has six programs to compile.
def test_every_pass_has_a_row(unoptimized, monkeypatch):
    stacks = bench.stacks(SIZES)
    two = {name: stacks[name] for name in ("transformer", "rank64")}
    monkeypatch.setattr(bench, "SMALL", SIZES)
    monkeypatch.setattr(bench, "stacks", lambda shape: two)
    rows = list(bench.rows(large=False, dtype="float32", repeats=1))
    wanted = {f"{NAME}/{model}/{what}" for model in two for what in PASSES}
    assert {row.name for row in rows} == wanted and len(rows) == len(wanted)
    for row in rows:
        if row.name.endswith("_step"):
            config = ModelConfig(vocabulary=8, stack=two[row.name.split("/")[1]])
            bytes_of = 4 * count_parameters(config).total
            assert row.shape["parameter_bytes"] == bytes_of
            assert 2 * bytes_of <= row.shape["optimizer_bytes"] < 2.1 * bytes_of
    summary = bench.summary(rows)
    assert summary.startswith("over the Transformer's time, forward: rank64 ")
    assert "decode: rank64" in summary


def test_four_models_of_as_many_layers_are_compared():
    stacks = bench.stacks(bench.SMALL)
    assert list(stacks) == ["transformer", "recursive2", "recursive3", "rank64"]
    assert {stack.layers for stack in stacks.values()} == {6}
    looped = [stacks[name] for name in ("recursive2", "recursive3", "rank64")]
    assert [stack.loops for stack in looped] == [2, 3, 2]
    assert [stack.rank for stack in looped] == [0, 0, 64]


def test_turns_are_taken():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = in_turns(calls, repeats=2, warmup=1)
    assert order == ["a", "b"] * 3
    assert {name: len(result) for name, result in times.items()} == {"a": 2, "b": 2}
