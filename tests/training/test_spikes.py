from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.training.spikes import SpikeConfig, judge, new_spike_state

CONFIG = SpikeConfig(window=8, sigma=3.0, patience=2)


def verdicts(losses, finite=None, config=CONFIG):
    rule = jax.jit(partial(judge, config=config))
    state, found = new_spike_state(config), []
    for loss, sound in zip(losses, finite or [True] * len(losses), strict=True):
        good, state = rule(state, jnp.float32(loss), jnp.bool_(sound))
        found.append(bool(good))
    return found, state


def noise(count, mean=5.0):
    return list(mean + np.random.default_rng(0).uniform(-0.1, 0.1, count))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_or_gradient_that_is_not_finite_never_counts(bad):
    assert verdicts([bad, 1.0])[0] == [False, True]
    assert verdicts([1.0, 1.0], finite=[False, True])[0] == [False, True]


def test_a_loss_counts_up_to_sigma_deviations_above_the_window():
    window = noise(8)
    limit = np.mean(window) + 3.0 * np.std(window)
    assert verdicts([*window, limit - 1e-3])[0][-1]
    assert not verdicts([*window, limit + 1e-3])[0][-1]
    assert verdicts([*window, 0.0])[0][-1]  # far below is good news


def test_the_window_must_be_full_before_it_judges():
    assert verdicts([*noise(7), 100.0])[0][-1]
    assert not verdicts([*noise(8), 100.0])[0][-1]


def test_the_window_holds_the_last_losses_that_counted():
    # The first eight leave the window; a skipped loss does not enter it.
    losses = [*noise(8), 100.0, *noise(8, mean=4.0)]
    found, state = verdicts(losses)
    assert found == [True] * 8 + [False] + [True] * 8
    np.testing.assert_allclose(np.sort(state.losses), np.sort(noise(8, mean=4.0)))
    assert int(state.accepted) == 16


def test_skips_in_a_row_are_counted_and_forgotten():
    assert int(verdicts([1.0, np.nan, np.nan])[1].skipped) == 2
    assert int(verdicts([1.0, np.nan, np.nan, 1.0])[1].skipped) == 0


def test_a_rule_that_is_off_lets_everything_count():
    off = SpikeConfig(enabled=False, window=8)
    assert all(verdicts([*noise(8), 100.0, np.nan], config=off)[0])


@pytest.mark.parametrize("field", [{"window": 1}, {"sigma": 0.0}, {"patience": 0}])
def test_a_rule_without_sense_is_refused(field):
    with pytest.raises(ValueError, match="SpikeConfig: window must be >= 2"):
        SpikeConfig(**field)
