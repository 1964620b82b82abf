"""The laws of every stack for the baseline's switches, and those of its windows."""

import numpy as np
import pytest

from recurjax.layers.position import LearnedPositions
from tests.laws import B, StackLaws, T, draw_ids, run
from tests.tolerances import assert_values_close
from tests.variants.transformer.switches import SWITCHES, VOCABULARY, build, small


class TestLaws(StackLaws):
    models = SWITCHES
    build = staticmethod(build)
    first = "rope_grouped_ring"

    def documents(self, config):
        learned = isinstance(config.stack.attention.position, LearnedPositions)
        return 0 if learned else 1


@pytest.fixture(scope="module")
def ids():
    return draw_ids(VOCABULARY)


def test_a_window_that_covers_all_equals_none(ids):
    """A ring longer than the sequence is a plain cache."""
    full, windowed = (build(small(windows=(window,))) for window in (None, T - 1))
    cache = windowed.init_cache(B, 3 * T)
    assert cache.groups[0].slots == T
    want, _ = run(full, ids, full.init_cache(B, 0))
    assert_values_close(run(windowed, ids, windowed.init_cache(B, 0))[0], want)
    assert_values_close(run(windowed, ids, cache)[0], want)


def test_a_window_hides_what_lies_before_it(ids):
    model = build(small(layers=1, windows=(3,)))
    whole, _ = run(model, ids, model.init_cache(B, 0))
    changed = ids.copy()
    changed[:, 0] = (ids[:, 0] + 1) % VOCABULARY
    other, _ = run(model, changed, model.init_cache(B, 0))
    np.testing.assert_array_equal(other[:, 4:], whole[:, 4:])
    assert np.all(np.any(other[:, 3] != whole[:, 3], axis=-1))


def test_rings_hold_their_window_and_no_more():
    cache = build(small(layers=4, windows=(3, None))).init_cache(2, 64)
    assert [group.slots for group in cache.groups] == [4, 64]
    assert cache.groups[0].keys.shape == (2, 2, 4, 4, 4)
