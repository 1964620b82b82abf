from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.training.spikes import SpikeConfig, judge, new_spike_state

CONFIG = SpikeConfig(window=8, sigma=3.0, patience=2)


def verdicts(losses, finite=None, config=CONFIG):
    rule = jax.jit(partial(judge, config=config))
    state, matches = new_spike_state(config), []
    for loss, sound in zip(losses, finite or [True] * len(losses), strict=True):
        good, state = rule(state, jnp.float32(loss), jnp.bool_(sound))
        matches.append(bool(good))
    return matches, state


def noise(count, mean=5.0):
    return list(mean + np.random.default_rng(0).uniform(-0.1, 0.1, count))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_or_gradient_that_is_not_finite_never_counts(bad):
    assert verdicts([bad, 1.0])[0] == [False, True]
    assert verdicts([1.0, 1.0], finite=[False, True])[0] == [False, True]


def limit_of(window, sigma=3.0):
    middle = np.median(window)
    deviation = 1.4826 * np.median(np.abs(window - middle))
    return middle + sigma * max(deviation, max(1.0, middle) / 100)


def test_a_loss_counts_up_to_sigma_deviations_above_the_median():
    window = noise(8)
    limit = limit_of(np.array(window))
    assert verdicts([*window, limit - 1e-3])[0][-1]
    assert not verdicts([*window, limit + 1e-3])[0][-1]
    assert verdicts([*window, 0.0])[0][-1]  # far below is good news


@pytest.mark.parametrize("known", [16, 17, 40, 127, 200])
def test_a_window_that_is_not_full_judges_by_what_is_known(known):
    losses = noise(known) + np.linspace(2.0, 0.0, known)
    limit = limit_of(losses[-128:], sigma=6.0)
    wide = SpikeConfig()
    assert verdicts([*losses, limit - 1e-3], config=wide)[0][-1]
    assert not verdicts([*losses, limit + 1e-3], config=wide)[0][-1]


def test_sixteen_losses_or_a_smaller_window_are_enough_to_judge():
    assert verdicts([*noise(7), 100.0])[0][-1]
    assert not verdicts([*noise(8), 100.0])[0][-1]
    assert verdicts([*noise(15), 100.0], config=SpikeConfig())[0][-1]
    assert not verdicts([*noise(16), 100.0], config=SpikeConfig())[0][-1]


@pytest.mark.parametrize("factor", [1.1, 1.5, 4.0])
def test_a_loss_that_grows_at_every_step_is_stopped(factor):
    losses = list(3.0 * factor ** np.arange(60))
    matches = verdicts(losses, config=SpikeConfig())[0]
    assert not any(matches[-10:])
    if factor == 1.5:
        assert (
            max(loss for loss, good in zip(losses, matches, strict=True) if good) < 1e4
        )


def test_one_huge_loss_that_was_let_in_hides_no_later_one():
    losses = [*noise(3), 1e30, *noise(30), 20.0, *noise(3)]
    assert (
        verdicts(losses, config=SpikeConfig())[0] == [True] * 34 + [False] + [True] * 3
    )


def test_losses_that_hardly_differ_make_no_spike_of_nothing():
    assert all(verdicts([*[1e-6] * 40, 1e-2], config=SpikeConfig())[0])
    assert all(verdicts([*[2.0] * 40, 2.1], config=SpikeConfig())[0])


def test_the_window_holds_the_last_losses_that_counted():
    # The first eight leave the window; a skipped loss does not enter it.
    losses = [*noise(8), 100.0, *noise(8, mean=4.0)]
    result, state = verdicts(losses)
    assert result == [True] * 8 + [False] + [True] * 8
    np.testing.assert_allclose(np.sort(state.losses), np.sort(noise(8, mean=4.0)))
    assert int(state.accepted) == 16


def test_skips_in_a_row_are_counted_and_forgotten():
    assert int(verdicts([1.0, np.nan, np.nan])[1].skipped) == 2
    assert int(verdicts([1.0, np.nan, np.nan, 1.0])[1].skipped) == 0


def test_a_rule_that_is_off_lets_everything_count():
    off = SpikeConfig(enabled=False, window=8)
    assert all(verdicts([*noise(8), 100.0, np.nan], config=off)[0])


@pytest.mark.parametrize(
    "field", [{"window": 1}, {"sigma": 0.0}, {"patience": 0}, {"sigma": np.nan}]
)
def test_a_rule_without_sense_is_refused(field):
    with pytest.raises(ValueError, match=rf"SpikeConfig\.{next(iter(field))}: must be"):
        SpikeConfig(**field)


@pytest.mark.parametrize(
    ("before", "after", "noise_of"),
    [(2.0, 2.15, 0.01), (2.0, 2.3, 0.01), (0.8, 1.2, 0.01), (3.0, 4.5, 0.1)],
)
def test_a_higher_level_that_is_steady_is_taken_after_a_few_skips(
    before, after, noise_of
):
    draw, config = np.random.default_rng(0).normal, SpikeConfig()
    losses = [*draw(before, noise_of, 200), *draw(after, noise_of, 300)]
    result, state = verdicts(losses, config=config)
    assert all(result[:200])
    assert result[200:].index(True) < config.patience
    assert all(result[200 + config.patience :])
    # The window is that of the new level: a spike above it is one again.
    assert not judge(state, jnp.float32(after + 1.5), jnp.bool_(True), config)[0]


def test_what_is_no_steady_level_ends_the_run():
    config, rng = SpikeConfig(), np.random.default_rng(0)
    for after in (
        np.linspace(3.0, 30.0, 40),  # grows
        rng.uniform(3.0, 9.0, 40),  # scatters
        np.where(np.arange(40) % 2, 3.0, np.nan),  # is no number in between
    ):
        matches, state = verdicts([*noise(40, mean=2.0), *after], config=config)
        assert not any(matches[40:])
        assert int(state.skipped) == 40 >= config.patience


def test_one_loss_is_no_level():
    config = SpikeConfig(patience=1)
    matches, state = verdicts([*noise(40), 100.0], config=config)
    assert not matches[-1] and int(state.skipped) == 1


def test_losses_of_other_data_are_not_compared_with():
    rule = jax.jit(partial(judge, config=CONFIG))
    state = verdicts(noise(8))[1]
    assert not rule(state, jnp.float32(100.0), jnp.bool_(True))[0]
    good, state = rule(state, jnp.float32(100.0), jnp.bool_(True), new_data=True)
    assert good and int(state.known) == 1 and int(state.accepted) == 9
