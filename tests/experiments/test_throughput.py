"""Figure 8's simulation: the paper's figures, and queues counted by hand."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from recurjax.errors import UserError

FILE = Path(__file__).parents[2] / "experiments/relaxed_recursive_transformer"


@pytest.fixture(scope="module")
def throughput():
    spec = importlib.util.spec_from_file_location("t", FILE / "throughput.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gemmas_throughput_is_the_papers(throughput):
    """1,622 and 3,159 tokens per second from 0.616 and 0.265 ms and 1.195 loops."""
    draw = np.random.default_rng(0)
    exits = 1 + (draw.random((500, 200)) < 0.195).astype(int)
    queue = throughput.draw_queue(exits, samples=20_000)
    assert queue.loops.sum() / queue.tokens.sum() == pytest.approx(1.195, abs=0.002)
    full = throughput.pass_times(("64:39.424",), option="full")
    block = throughput.pass_times(("74:19.61",), option="block")
    found = throughput.throughput(queue, full, block)
    assert found["sequence"] == pytest.approx(1622, rel=2e-3)
    assert found["depth"] == pytest.approx(3159, rel=3e-3)


def test_small_queues_run_as_counted_by_hand(throughput):
    passes = np.array([3, 1, 2, 1])
    # Two slots: (3), (1, 2), then the last when both are free at pass 3.
    assert throughput.refilled(passes, 2).tolist() == [2, 2, 2, 1]
    assert throughput.in_batches(passes, 2).tolist() == [2, 2, 2, 2, 2]
    assert throughput.refilled(passes, 9).tolist() == [4, 2, 1]
    times = throughput.pass_times(("4:8", "2:2"), option="full")
    assert times.of(np.array([1, 2, 3])).tolist() == [1, 2, 5]
    exits = np.array([[0, 1, 2, 0], [2, 2, 2, 2]])
    queue = throughput.draw_queue(exits, samples=50, tokens=3)
    assert {*zip(queue.tokens, queue.loops, strict=True)} == {(2, 3), (3, 6)}
    with pytest.raises(UserError, match="--full 8: write ROWS:MS"):
        throughput.pass_times(("8",), option="full")


def test_the_largest_batch_leaves_room_for_the_parameters(throughput):
    config = throughput.load_experiment(
        "relaxed_recursive_transformer:gemma_b2_stepwise_60b"
    ).model
    parameters = 2 * 1_515_000_000
    each = 18 * 2 * 256 * 2 * 2560  # layers, keys and values, one head, bfloat16
    rows = throughput.largest_batch(config, length=2560, memory=40 * 2**30)
    assert rows == pytest.approx((40 * 2**30 - parameters) / each, rel=0.01)
