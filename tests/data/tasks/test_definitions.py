"""What each task asks, against its definition: read the row, work out the answer."""

from itertools import permutations

import numpy as np
import pytest

from recurjax.data.tasks import (
    Compression,
    Copy,
    FuzzyRecall,
    HashHop,
    InContextRecall,
    Memorization,
    Mqar,
    Needles,
    SelectiveCopying,
    Setting,
    StateTracking,
    row_of,
)
from recurjax.data.tasks.hash_hop import right_share
from recurjax.data.tasks.mad import BASELINES, CHANGES, key_value_map
from recurjax.data.tasks.state_tracking import multiplication
from recurjax.types import IGNORED

NUMBERS = range(20)


def rows(task, split="validation"):
    return [row_of(task, seed=3, split=split, number=number) for number in NUMBERS]


@pytest.mark.parametrize("noise", [0.0, 0.9])
def test_recall_asks_the_value_of_every_key_that_came_before(noise):
    task = InContextRecall(
        length=32, vocabulary=32, noise_vocabulary=16, noise=noise
    )  # fmt: skip
    for row in rows(task):
        known, want = {}, np.full(32, IGNORED)
        for t in range(0, 32, 2):
            key, value = row.ids[t : t + 2]
            if key >= 16:  # noise, both of it
                assert value >= 16
                continue
            assert 0 <= key < 8 <= value < 16
            assert known.get(key, value) == value
            if key in known:
                want[t] = value
            known[key] = value
        np.testing.assert_array_equal(row.targets, want)
        assert want[30] != IGNORED  # the last key has come before


def test_recall_learns_from_every_token():
    for row in rows(InContextRecall(length=32), "train"):
        np.testing.assert_array_equal(row.targets[:-1], row.ids[1:])
        assert row.targets[-1] == IGNORED


def test_noise_takes_about_its_share_of_the_pairs():
    task = InContextRecall(
        length=128, vocabulary=32, noise_vocabulary=16, noise=0.4
    )  # fmt: skip
    share = np.mean([(row.ids[:126:2] >= 16).mean() for row in rows(task)])
    assert 0.33 < share < 0.47


def test_fuzzy_keys_have_full_size_in_the_test_and_the_last_is_asked():
    task = FuzzyRecall(length=96)
    for row in rows(task):
        tokens = row.ids[row.ids < 15].tolist()  # less the padding on the left
        assert (row.ids[: 96 - len(tokens)] == 15).all()
        pairs, at = [], 0
        while at < len(tokens):
            key = tuple(tokens[at : at + 3])
            assert max(key) < 7
            at += 3
            start = at
            while at < len(tokens) and tokens[at] >= 7:
                at += 1
            value = tuple(tokens[start:at])
            assert 1 <= len(value) <= 3 and len(set(value)) == len(value)
            pairs.append((key, value))
        known, want = {}, []
        for key, value in pairs:
            assert known.get(key, value) == value
            want += [IGNORED] * 3 + (
                list(value) if key in known else [IGNORED] * len(value)
            )
            known[key] = value
        assert pairs[-1] in pairs[:-1]
        answered = row.targets[96 - len(tokens) :]
        np.testing.assert_array_equal(answered[:-1], want[1:])
        assert answered[-1] == IGNORED


def test_fuzzy_rows_to_learn_from_have_keys_of_every_size():
    sizes = set()
    for row in rows(FuzzyRecall(length=96), "train"):
        tokens = row.ids[row.ids < 15] < 7
        runs = np.diff(np.flatnonzero(np.diff(np.r_[0, tokens, 0])))[::2]
        sizes |= set(runs.tolist())
    assert sizes == {1, 2, 3}


def test_memorization_asks_one_map_at_the_insert_token():
    task = Memorization()
    keys, values = key_value_map(255, 12345)
    by_name = dict(zip(keys.tolist(), values.tolist(), strict=True))
    assert sorted(by_name) == list(range(127)) and min(by_name.values()) >= 127
    for row in rows(task):
        assert (row.ids[1::2] == 255).all() and (row.targets[0::2] == IGNORED).all()
        want = [by_name[key] for key in row.ids[0::2].tolist()]
        assert row.targets[1::2].tolist() == want


def test_the_map_is_mads():
    # MAD shuffles its lists of permutations of size one with this generator.
    rng = np.random.default_rng(12345)
    keys = list(permutations(np.arange(127), 1))
    values = list(permutations(np.arange(127, 255), 1))
    rng.shuffle(keys)
    rng.shuffle(values)
    got = key_value_map(255, 12345)
    assert got[0].tolist() == [int(key) for (key,) in keys]
    assert got[1].tolist() == [int(value) for (value,) in values[:127]]


def test_selective_copying_gives_the_tokens_in_order_and_no_blank_after_the_last():
    task = SelectiveCopying(length=64, tokens_to_copy=8)
    for row in rows(task):
        read, asked = row.ids[:55], row.targets[56:]
        assert row.ids[55] == 15 and (row.ids[56:] == 14).all()
        np.testing.assert_array_equal(read[read != 14], asked)
        assert len(asked) == 8 and (row.targets[:56] == IGNORED).all()
        assert read[-1] != 14


def test_compression_asks_the_whole_row():
    for row in rows(Compression()):
        np.testing.assert_array_equal(row.targets, row.ids)
        assert row.ids[-1] == 15 and row.ids[:-1].max() < 15


def test_mads_baselines_and_changes_can_all_be_made():
    from dataclasses import replace

    assert len(BASELINES) == len(CHANGES) == 6
    result = 0
    for name, task in BASELINES.items():
        for field, values in CHANGES[name].items():
            for value in values:
                changed = replace(task, **{field: value})
                if changed.longest("train") <= 256:
                    row_of(changed, seed=0, split="train", number=0)
                result += 1
    assert result == 10 + 10 + 13 + 5 + 12 + 10
    assert BASELINES["memorization"].train_rows == 256
    assert {BASELINES[n].train_rows for n in BASELINES if n != "memorization"} == {
        12800
    }


def test_mqar_asks_each_key_once_with_its_own_value():
    task = Mqar(
        vocabulary=128, validation=(Setting(64, 8, 20),), train=(Setting(64, 8, 1),)
    )
    gaps = []
    for row in rows(task):
        keys, values = row.ids[0:16:2], row.ids[1:16:2]
        assert len(set(keys.tolist())) == len(set(values.tolist())) == 8
        assert keys.min() >= 1 and keys.max() < 64 <= values.min()
        by_name = dict(zip(keys.tolist(), values.tolist(), strict=True))
        at = np.flatnonzero(row.targets != IGNORED)
        assert len(at) == 8 and at.min() >= 16 and (at % 2 == 0).all()
        assert sorted(row.ids[at].tolist()) == sorted(by_name)
        assert [by_name[key] for key in row.ids[at].tolist()] == row.targets[
            at
        ].tolist()
        assert row.slices == {"length": 64, "pairs": 8}
        gaps += ((at - 16) // 2).tolist()
    # The power law prefers short gaps: of 24 places the first 8 have well over a third.
    assert np.mean(np.array(gaps) < 8) > 0.45


def test_mqar_without_random_tokens_has_token_0_between_its_queries():
    setting = (Setting(64, 8, 20),)
    task = Mqar(
        vocabulary=128, train=setting, validation=setting, random_non_queries=False
    )
    for row in rows(task):
        hay = row.targets[16:] == IGNORED
        assert (row.ids[16:][hay] == 0).all() and (row.ids[16:][~hay] > 0).all()


def test_needles_are_asked_at_the_end_wherever_they_lie():
    task, depths = Needles(keys=8, values=4, hay=16, needles=3, length=30), []
    for row in rows(task):
        body, asked = row.ids[:27], row.ids[27:]
        at = np.flatnonzero(body < 8)
        by_name = {int(body[t]): int(body[t + 1]) for t in at}
        assert len(at) == len(by_name) == 3 and sorted(asked.tolist()) == sorted(
            by_name
        )
        assert all(8 <= value < 12 for value in by_name.values())
        # All else is hay: nothing looks like a needle and is none.
        assert (np.delete(body, [*at, *(at + 1)]) >= 12).all()
        assert (row.targets[:27] == IGNORED).all()
        assert [by_name[key] for key in asked.tolist()] == row.targets[27:].tolist()
        depths += at.tolist()
    assert min(depths) <= 2 and max(depths) >= 23


def test_mqar_has_the_settings_of_figure_2_one_after_the_other():
    task = Mqar()
    assert task.count("train") == 180_000 and task.count("validation") == 7000
    assert task.setting("train", 99_999) == Setting(64, 4, 100_000)
    assert task.setting("train", 100_000) == Setting(128, 8, 20_000)
    assert task.setting("validation", 6999) == Setting(1024, 256, 1000)
    with pytest.raises(IndexError):
        task.setting("validation", 7000)
    longest = row_of(task, seed=0, split="validation", number=6999)
    assert longest.ids.shape == (1024,) and (longest.targets != IGNORED).sum() == 256


@pytest.mark.parametrize(("group", "size"), [("parity", 2), ("S3", 6), ("S5", 120)])
def test_the_products_are_a_groups(group, size):
    table = multiplication(group)
    assert table.shape == (size, size)
    everything = np.arange(size)
    np.testing.assert_array_equal(table[0], everything)  # the identity
    np.testing.assert_array_equal(table[:, 0], everything)
    assert (np.sort(table, axis=0) == everything[:, None]).all()  # inverses
    a, b, c = np.random.default_rng(0).integers(size, size=(3, 50))
    np.testing.assert_array_equal(table[table[a, b], c], table[a, table[b, c]])
    assert (table == table.T).all() == (group == "parity")


def test_states_are_the_products_of_all_that_was_read():
    task = StateTracking(group="S3", length=8)
    elements = list(permutations(range(3)))
    for row in rows(task):
        assert row.ids.shape == (32,)  # read on to four times the length
        state = (0, 1, 2)
        for element, want in zip(row.ids, row.targets, strict=True):
            move = elements[element]
            state = tuple(move[i] for i in state)
            assert elements[want] == state


def test_copies_follow_their_strings():
    task = Copy(letters=5, length=64, shortest=3, longest_string=9)
    begin, bar, end, pad = 5, 6, 7, 8
    for row in rows(task):
        stop = row.ids.tolist().index(end) + 1
        assert (row.ids[stop:] == pad).all() and row.ids[0] == begin
        middle = row.ids.tolist().index(bar)
        string = row.ids[1:middle].tolist()
        assert row.ids[middle + 1 : stop].tolist() == [*string, end]
        want = np.full(64, IGNORED)
        want[middle : stop - 1] = [*string, end]
        np.testing.assert_array_equal(row.targets, want)
        assert row.slices["string"] == len(string)
    for row in rows(task, "train"):
        assert (row.ids != pad).all()  # filled with strings; the last one is cut
        asked = row.targets != IGNORED
        np.testing.assert_array_equal(row.targets[asked], row.ids[1:][asked[:-1]])
        assert not asked[row.ids.tolist()[::-1].index(begin) * -1 - 1 :].any() or (
            row.ids[-1] == end
        )


@pytest.mark.parametrize("chains", ["one", "full"])
@pytest.mark.parametrize("thoughts", [True, False])
def test_hops_can_be_followed_through_the_prompt(chains, thoughts):
    task = HashHop(size=3, hops=4, length=240, chains=chains, thoughts=thoughts)
    for row in rows(task):
        text = bytes(row.ids.tolist()).rstrip(b"\0").decode()
        *lines, last = text.splitlines()
        by_name = dict(line.split(" = ") for line in lines)
        assert len(by_name) == len(lines) == task.pairs
        first, *answer = last.removeprefix(">").split(" = ")
        chain = [first]
        for _ in range(4):
            chain.append(by_name[chain[-1]])
        assert answer == (chain[1:] if thoughts else chain[-1:])
        assert chain[-1] not in by_name  # a chain ends
        starts = set(by_name) - set(by_name.values())
        assert len(starts) == (task.pairs // 4 if chains == "full" else task.pairs - 3)
        asked = bytes(row.targets[row.targets != IGNORED].tolist()).decode()
        assert asked == "".join(f" = {element}" for element in answer) + "\n"
        assert right_share(tuple(answer), asked) == 1.0


def test_the_score_is_the_longest_right_beginning():
    answer = ("aa", "bb", "cc", "dd")
    assert right_share(answer, " = aa = bb = xx = dd\n") == 0.5
    assert right_share(answer, " = bb = aa\n") == 0.0
    assert right_share(answer, " = aa\n = bb") == 0.25
    assert right_share(answer, "") == 0.0


def test_hash_hop_at_the_papers_size_fills_its_characters():
    task = HashHop()
    row = row_of(task, seed=0, split="validation", number=0)
    used = int(np.flatnonzero(row.ids)[-1]) + 1
    assert 6144 - 20 < used <= 6144 and task.pairs == (6144 - 186) // 20
