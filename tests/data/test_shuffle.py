"""The endless shuffle: another permutation each epoch, at any place, on any machine."""

import threading

import grain
import numpy as np
import pytest

from recurjax.data import shuffle
from recurjax.data.shuffle import EndlessOrder


@pytest.fixture
def ciphered(monkeypatch):
    """Every set counts as a large one."""
    monkeypatch.setattr(shuffle, "LARGEST_TABLE", 0)


def epoch_of(order, count, epoch):
    return [order(epoch * count + at) for at in range(count)]


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
@pytest.mark.parametrize("count", [1, 7, 870, 65536, 65538, 200_000, 10**6, 2**33])
def test_a_large_sets_order_is_grains(count, seed, ciphered):
    """To the bit: a place that an older version saved goes on where it was."""
    want = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
    order = EndlessOrder(count, seed)
    # The first places, those around the border of two epochs, and some far on.
    some = [*range(6), *range(max(0, count - 3), count + 3), 5 * count + count // 2]
    assert [order(place) for place in some] == [int(want[place]) for place in some]


@pytest.mark.parametrize("count", [1, 5, 870, 65537])
def test_every_epoch_is_another_permutation(count):
    order = EndlessOrder(count, seed=1)
    epochs = [epoch_of(order, count, epoch) for epoch in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
    assert count < 6 or epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert count < 6 or epochs[0] != epoch_of(EndlessOrder(count, 2), count, 0)


@pytest.mark.parametrize("count", [5, 257, 870, 65537])
def test_every_ciphered_epoch_is_a_permutation(count, ciphered):
    """With 65,537 too, of which grain's order repeats one number and lacks another."""
    order = EndlessOrder(count, seed=1)
    np.testing.assert_array_equal(np.sort(epoch_of(order, count, 0)), np.arange(count))


def test_orders_never_change():
    """A run resumes with any numpy and any grain: these orders are in checkpoints."""
    order = EndlessOrder(10, seed=7)
    assert [order(place) for place in range(20)] == [
        *(6, 3, 4, 9, 0, 2, 8, 7, 5, 1),
        *(1, 3, 2, 7, 8, 4, 5, 9, 0, 6),
    ]
    large = EndlessOrder(5_000_000, seed=7)
    places = (0, 1, 4_999_999, 5_000_000)
    assert [large(place) for place in places] == [3534333, 3384037, 2211736, 229770]


@pytest.mark.parametrize("count", [100, 5_000_000])
def test_places_are_found_in_any_order_and_by_several_threads(count):
    places = np.random.default_rng(0).integers(0, 3 * count, 20).tolist()
    want = {place: EndlessOrder(count, 2)(place) for place in places}
    order, results = EndlessOrder(count, 2), []
    threads = [
        threading.Thread(target=lambda: results.extend((p, order(p)) for p in places))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    assert all(want[place] == number for place, number in results)


def test_a_small_sets_epoch_is_drawn_once(monkeypatch):
    calls, real = [], EndlessOrder._permutation

    def permutation(self, epoch):
        calls.append(epoch)
        return real(self, epoch)

    monkeypatch.setattr(EndlessOrder, "_permutation", permutation)
    order = EndlessOrder(500, seed=0)
    # As threads read that are ahead of each other, across the border of two epochs.
    for place in range(0, 1000, 4):
        order(place + 3), order(place)
    assert calls == [0, 1]
