"""The endless shuffle: grain's order to the bit, and a permutation each epoch."""

import threading

import grain
import numpy as np
import pytest

from recurjax.data import shuffle
from recurjax.data.shuffle import EndlessOrder


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
@pytest.mark.parametrize("count", [1, 2, 7, 870, 65536, 65538, 200_000, 10**6, 2**33])
def test_the_order_is_grains(count, seed):
    want = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
    order = EndlessOrder(count, seed)
    # The first places, those around the border of two epochs, and some far on.
    some = [*range(6), *range(max(0, count - 3), count + 3), 5 * count + count // 2]
    assert [order(place) for place in some] == [int(want[place]) for place in some]


@pytest.mark.parametrize("count", [1, 5, 870, 65536, 65537])
def test_every_epoch_is_another_permutation(count):
    """With 65,537 too, of which grain's order repeats one number and lacks another."""
    order = EndlessOrder(count, seed=1)
    borders = range(0, count, order._stretch)
    epochs = [
        [number for first in borders for number in order._shuffled(epoch, first)]
        for epoch in range(2)
    ]
    assert order(count + count // 2) == epochs[1][count // 2]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
    assert count < 6 or epochs[0] != epochs[1]


@pytest.mark.parametrize("count", [100, 70_000])
def test_places_are_found_in_any_order_and_by_several_threads(count):
    places = np.random.default_rng(0).integers(0, 3 * count, 20).tolist()
    want = {place: EndlessOrder(count, 2)(place) for place in places}
    order, found = EndlessOrder(count, 2), []
    threads = [
        threading.Thread(target=lambda: found.extend((p, order(p)) for p in places))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found and all(want[place] == number for place, number in found)
    assert len(order._made) <= shuffle._KEPT


def test_a_small_sets_epoch_is_enciphered_once(monkeypatch):
    calls, real = [], shuffle._enciphered_bytes

    def encipher(keys):
        calls.append(real(keys))
        return calls[-1]

    monkeypatch.setattr(shuffle, "_enciphered_bytes", encipher)
    order = EndlessOrder(500, seed=0)
    for place in range(1000):
        order(place)
    assert [len(table) for table in calls] == [1 << 16] * 2


def test_the_table_of_two_bytes_is_the_cipher_of_each_number():
    keys = shuffle._round_keys(7)
    want = shuffle._encipher(np.arange(1 << 16), 16, keys)
    np.testing.assert_array_equal(shuffle._enciphered_bytes(keys), want)


@pytest.mark.parametrize("count", [1, 7, 100, 70_000])
def test_places_that_follow_each_other_are_found_at_once(count):
    """Across the borders of epochs, and of the stretches of a large set."""
    order, alone = EndlessOrder(count, 2), EndlessOrder(count, 2)
    for place in (0, count - 1, 4090, 2 * count - 5 if count > 5 else 0):
        want = [alone(place + n) for n in range(12)]
        assert order.following(place, 12) == want
    assert order.following(3, 0) == []


def test_places_of_many_epochs_are_found_at_once():
    """As a large batch of a mixture asks a tiny part for its rows."""
    order, alone = EndlessOrder(2, 1), EndlessOrder(2, 1)
    assert order.following(1, 2500) == [alone(1 + n) for n in range(2500)]
