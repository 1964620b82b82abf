"""A task in the place of a corpus: batches, exact resume, any division of the rows."""

import itertools
import json

import numpy as np
import pytest

from recurjax.config_json import from_json, to_json
from recurjax.data.tasks import (
    HashHop,
    InContextRecall,
    Mqar,
    Setting,
    StateTracking,
    TaskData,
    TaskDataset,
)
from recurjax.data.tasks.rows import held_out, row_of
from recurjax.data.tokenizers import Symbols, load_tokenizer
from recurjax.errors import UserError
from recurjax.types import IGNORED

ENDLESS = StateTracking(group="S3", length=12, validation_length=12, validation_rows=5)
FIXED = InContextRecall(length=12, train_rows=7, validation_rows=5)
PARTS = Mqar(
    vocabulary=64,
    train=(Setting(8, 2, 4), Setting(12, 3, 3)),
    validation=(Setting(12, 2, 5),),
)
TASKS = pytest.mark.parametrize(
    "task", [ENDLESS, FIXED, PARTS], ids=["endless", "fixed", "parts"]
)


def dataset(task, **settings) -> TaskDataset:
    return TaskDataset(config=TaskData(task=task, seed=5, **settings))


def taken(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches) for _ in range(count)]


def assert_same(got, want) -> None:
    assert len(got) == len(want)
    for first, other in zip(got, want, strict=True):
        assert first.keys() == other.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], other[name])


@TASKS
@pytest.mark.parametrize("prefetch", [0, 3])
def test_resuming_after_any_step_is_exact(task, prefetch):
    loader = dataset(task, prefetch=prefetch).loader("train", length=12, batch=3)
    want = taken(iter(loader), 6)
    for step in range(6):
        first = iter(loader)
        taken(first, step)
        state = json.loads(json.dumps(first.get_state()))
        again = iter(loader)
        again.set_state(state)
        assert_same(taken(again, 6 - step), want[step:])


@TASKS
def test_any_division_of_the_rows_gives_the_whole_batch(task):
    opened = dataset(task)
    want = taken(iter(opened.loader("train", length=12, batch=6)), 3)
    for edges in ((0, 2, 6), (0, 1, 2, 3, 4, 5, 6)):
        parts = [
            taken(iter(opened.loader("train", length=12, batch=6, rows=rows)), 3)
            for rows in itertools.pairwise(edges)
        ]
        joined = [
            {name: np.concatenate([part[name] for part in step]) for name in step[0]}
            for step in zip(*parts, strict=True)
        ]
        assert_same(joined, want)


@pytest.mark.parametrize("task", [FIXED, PARTS], ids=["fixed", "parts"])
def test_a_fixed_set_comes_once_an_epoch_in_another_order(task):
    rows = dataset(task)
    loader = iter(rows.loader("train", length=12, batch=7))
    epochs = [[row.tobytes() for row in next(loader)["ids"]] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert len(set(epochs[0])) == 7


@TASKS
def test_the_test_is_one_pass_in_order_and_its_last_batch_asks_nothing_more(task):
    rows = dataset(task)
    loader = rows.loader("validation", length=16, batch=2)
    batches = list(loader)
    assert loader.batches == len(batches) == 3
    ids = np.concatenate([batch["ids"] for batch in batches])
    targets = np.concatenate([batch["targets"] for batch in batches])
    for number in range(5):
        row = row_of(task, seed=5, split="validation", number=number)
        np.testing.assert_array_equal(ids[number, : len(row.ids)], row.ids)
        np.testing.assert_array_equal(targets[number, :12], row.targets)
    assert (targets[:, 12:] == IGNORED).all() and (targets[5] == IGNORED).all()


TURNS = Mqar(
    vocabulary=64,
    train=(Setting(8, 2, 6), Setting(12, 3, 4)),
    validation=(Setting(12, 2, 5),),
)


def settings_of(batches) -> list[tuple[int, list[int]]]:
    """Returns each batch's length and how many answers its rows ask."""
    return [
        (batch["ids"].shape[1], sorted((batch["targets"] != IGNORED).sum(1).tolist()))
        for batch in batches
    ]


def test_settings_take_turns_in_batches_of_their_length():
    loader = dataset(TURNS, order="settings").loader("train", length=12, batch=2)
    batches = taken(iter(loader), 10)
    # Three batches of the first setting and two of the second make an epoch.
    epoch = [(8, [2, 2])] * 3 + [(12, [3, 3])] * 2
    assert settings_of(batches) == 2 * epoch
    for first, count in ((0, 6), (3, 4)):
        epochs = [batches[first + at : first + at + count // 2] for at in (0, 5)]
        rows = [
            [row.tobytes() for batch in part for row in batch["ids"]] for part in epochs
        ]
        assert sorted(rows[0]) == sorted(rows[1]) and rows[0] != rows[1]
    # Resumed and divided among processes the batches are the same.
    again = iter(loader)
    taken(again, 4)
    state = json.loads(json.dumps(again.get_state()))
    resumed = iter(loader)
    resumed.set_state(state)
    assert_same(taken(resumed, 6), batches[4:])
    half = dataset(TURNS, order="settings").loader(
        "train", length=12, batch=2, rows=(1, 2)
    )
    assert_same(
        taken(iter(half), 5),
        [{name: rows[1:] for name, rows in batch.items()} for batch in batches[:5]],
    )


def test_a_curriculum_adds_settings_at_its_stages():
    rows = dataset(TURNS, stages=(0, 3))
    batches = settings_of(taken(iter(rows.loader("train", length=12, batch=4)), 8))
    assert batches[:3] == [(12, [2] * 4)] * 3
    # From step 3 on an epoch is all ten rows: six ask two answers, four three.
    later = [count for _, counts in batches[3:] for count in counts]
    assert sorted(later) == [2] * 12 + [3] * 8
    by_turns = dataset(TURNS, order="settings", stages=(0, 2))
    lengths = [
        length
        for length, _ in settings_of(
            taken(iter(by_turns.loader("train", length=12, batch=2)), 7)
        )
    ]
    assert lengths == [8, 8, 8, 8, 8, 12, 12]
    state = iter(rows.loader("train", length=12, batch=4)).get_state()
    with pytest.raises(UserError, match="checkpoint's position"):
        iter(dataset(TURNS).loader("train", length=12, batch=4)).set_state(state)


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        (FIXED, {"order": "settings"}, "InContextRecall has one: leave them"),
        (TURNS, {"stages": (0, 5, 9)}, "must have 2 ascending steps from 0 on"),
        (TURNS, {"stages": (1, 5)}, "must have 2 ascending steps from 0 on"),
    ],
)
def test_a_curriculum_that_does_not_fit_the_task_is_refused(task, wrong, message):
    with pytest.raises(UserError, match=message):
        dataset(task, **wrong)


def test_rows_longer_than_the_batch_are_refused():
    with pytest.raises(UserError, match="train rows of 12 tokens, .* length 8"):
        dataset(PARTS).loader("train", length=8, batch=2)


def test_rows_without_end_are_no_pass():
    with pytest.raises(UserError, match="without end"):
        dataset(ENDLESS).loader("train", length=12, batch=2, in_order=True)


def test_a_place_in_other_rows_is_refused():
    state = iter(dataset(ENDLESS).loader("train", length=12, batch=2)).get_state()
    other = TaskDataset(config=TaskData(task=ENDLESS, seed=6))
    with pytest.raises(UserError, match="checkpoint's position"):
        iter(other.loader("train", length=12, batch=2)).set_state(state)


@TASKS
def test_a_task_survives_its_json(task):
    config = TaskData(task=task)
    text = json.loads(json.dumps(to_json(config)))
    assert from_json(TaskData, text, path="data") == config


def test_symbols_are_numbers(tmp_path):
    tokenizer = dataset(ENDLESS).tokenizer
    assert isinstance(tokenizer, Symbols) and tokenizer.vocabulary == 6
    assert tokenizer.decode(tokenizer.encode("5 0  3")) == "5 0 3"
    stream = tokenizer.stream()
    assert stream.push([5]) + stream.push([]) + stream.push([0, 3]) == "5 0 3"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).hash == tokenizer.hash
    for word in ("6", "-1", "x", "²", "1e3"):
        with pytest.raises(UserError, match="not a symbol"):
            tokenizer.encode(f"1 {word}")


def test_a_damaged_symbols_file_is_named(tmp_path):
    for text in ("{}", "[", '{"vocabulary": "8"}', '{"vocabulary": 0}'):
        (tmp_path / "symbols.json").write_text(text)
        with pytest.raises(UserError, match=r"symbols\.json"):
            load_tokenizer(tmp_path)


def test_hash_hop_is_text():
    rows = dataset(HashHop(size=3, hops=2, length=64))
    row = rows.row("validation", 0)
    text = rows.tokenizer.decode(row.ids[row.ids > 0])
    assert " = " in text and text.endswith("\n") and rows.vocabulary == 256


def test_rows_held_out_are_the_same_everywhere():
    """By their tokens alone: results of one release compare with another's."""
    rows = [np.array([n, 7], np.int32) for n in range(100)]
    assert [n for n in range(100) if held_out(rows[n])] == [0, 5, 9, 31, 57, 59]
