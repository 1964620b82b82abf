import json
import re

import numpy as np
import pytest

from recurjax.data.batches import Layout
from recurjax.data.loader import _plain
from recurjax.data.packing import BestFit, segment_numbers
from recurjax.data.pipeline import PackedBatches
from recurjax.data.shares import Shares
from recurjax.data.streams import MemoryStream, Split
from tests.golden.cases import golden_cases

CASES = golden_cases("latent_recurrent_transformer/dataloader_docs*.json")


def packed_by_hand(lengths, order, *, capacity, rows, buffer, refill):
    """Best fit as its definition: scan the buffer for the largest that fits."""
    waiting, position, packed = [], 0, []
    for _ in range(rows):
        row, left = [], capacity
        while left > 0:
            while len(waiting) < buffer:
                waiting += [order(position + i) for i in range(refill)]
                position += refill
            best = None
            for document in waiting:
                fits = lengths[document] <= left
                if fits and (best is None or lengths[document] > lengths[best]):
                    best = document
            if best is None:
                best = min(waiting, key=lambda document: lengths[document])
            waiting.remove(best)
            row.append((best, min(lengths[best], left)))
            left -= row[-1][1]
        packed.append(row)
    return packed


@pytest.mark.parametrize("case", CASES)
def test_best_fit_reproduces_the_loader_of_nanochat(case):
    written = json.loads(case.read_text())
    refill, buffer = (
        int(re.search(f"{words}(\\d+)", written["note"])[1])
        for words in ("in batches of ", "buffer_size=")
    )
    documents = written["docs"]
    want = np.load(case.with_name(case.stem.replace("docs", "bestfit") + ".npz"))
    steps, batch, length = want["inputs"].shape
    ids = [np.array([0, *document]) for document in documents]  # BOS is 0
    stream = MemoryStream(ids, vocabulary=256)
    split = Split(name="train", stream=stream, start=0, stop=stream.tokens)
    lengths = np.array([len(document) for document in ids])
    layout = Layout(length=length, batch=batch, rows=(0, batch), segments=False)
    batches = iter(
        PackedBatches(
            [split],
            layout,
            Shares([(0, [1.0])]),
            lambda: [BestFit(lengths, lambda k: k, buffer=buffer, refill=refill)],
        )
    )
    for step in range(steps):
        got = next(batches)
        np.testing.assert_array_equal(got["ids"], want["inputs"][step])
        np.testing.assert_array_equal(got["targets"], want["targets"][step])


@pytest.mark.parametrize("buffer, refill", [(1, 1), (7, 3), (40, 16)])
def test_best_fit_is_its_definition(buffer, refill):
    rng = np.random.default_rng(buffer)
    lengths = rng.integers(1, 30, 500)
    plan = BestFit(lengths, lambda k: k, buffer=buffer, refill=refill)
    got = [plan.row(25) for _ in range(30)]
    assert got == packed_by_hand(
        lengths, lambda k: k, capacity=25, rows=30, buffer=buffer, refill=refill
    )


def test_rows_are_full_and_no_document_comes_twice():
    lengths = np.random.default_rng(1).integers(1, 60, 400)
    plan = BestFit(lengths, lambda k: k, buffer=30)
    rows = [plan.row(32) for _ in range(40)]
    assert all(sum(take for _, take in row) == 32 for row in rows)
    used = [document for row in rows for document, _ in row]
    assert len(used) == len(set(used))
    for row in rows:  # only the last document of a row may be cropped
        assert all(take == lengths[document] for document, take in row[:-1])


def test_documents_that_end_are_packed_to_the_last():
    lengths = np.random.default_rng(3).integers(1, 12, 50)
    plan = BestFit(lengths, lambda k: k, buffer=20, refill=8, documents=50)
    rows = list(iter(lambda: plan.row(10), []))
    assert all(sum(take for _, take in row) == 10 for row in rows[:-1])
    assert sorted(d for row in rows for d, _ in row) == list(range(50))
    endless = BestFit(lengths, lambda k: k, buffer=20, refill=8)
    assert rows[:15] == [endless.row(10) for _ in range(15)]


def test_a_plan_continues_exactly_from_its_state():
    lengths = np.random.default_rng(2).integers(1, 40, 300)
    plan = BestFit(lengths, lambda k: k, buffer=20)
    for _ in range(5):
        plan.row(33)
    state = json.loads(json.dumps(_plain(plan.get_state())))
    want = [plan.row(33) for _ in range(9)]
    again = BestFit(lengths, lambda k: k, buffer=20)
    again.set_state(state)
    assert [again.row(33) for _ in range(9)] == want


def test_segments_number_the_documents_of_a_row_from_zero():
    starts = np.array([0, 3, 4, 10, 11])
    document = np.searchsorted(starts, np.arange(20), side="right")
    for begin in range(15):
        for length in (1, 2, 5):
            of_row = document[begin : begin + length]
            got = segment_numbers(starts, begin, length)
            np.testing.assert_array_equal(got, of_row - of_row[0])
