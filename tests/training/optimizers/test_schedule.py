import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.training.optimizers import (
    Constant,
    Cosine,
    LinearWarmdown,
    learning_rate,
)

PEAK, STEPS, WARMUP = 0.5, 20, 4


def rates(schedule, steps=STEPS):
    rate = learning_rate(schedule, peak=PEAK, steps=steps)
    return np.array([float(rate(step)) for step in range(steps + 1)])


def warmup(start):
    return PEAK * (start + (1 - start) * np.arange(WARMUP) / WARMUP)


def test_every_schedule_rises_on_a_line_to_the_peak():
    for kind in (Constant, Cosine, LinearWarmdown):
        got = rates(kind(warmup_steps=WARMUP, start=0.2))
        np.testing.assert_allclose(got[:WARMUP], warmup(0.2), rtol=1e-6)
        assert got[WARMUP] == pytest.approx(PEAK)


def test_constant_stays_at_the_peak():
    assert (rates(Constant()) == PEAK).all()
    assert (rates(Constant(warmup_steps=WARMUP))[WARMUP:] == PEAK).all()


def test_cosine_is_half_a_cosine_from_the_warmup_to_the_end():
    t = np.arange(STEPS - WARMUP + 1) / (STEPS - WARMUP)
    want = PEAK * (0.1 + 0.9 * (1 + np.cos(np.pi * t)) / 2)
    got = rates(Cosine(warmup_steps=WARMUP))[WARMUP:]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_warmdown_is_a_line_over_the_last_share_of_the_steps():
    got = rates(LinearWarmdown(warmup_steps=WARMUP, warmdown=0.4, end=0.25))
    np.testing.assert_allclose(got[WARMUP:13], PEAK, rtol=1e-6)
    line = PEAK * (1 - 0.75 * np.arange(9) / 8)
    np.testing.assert_allclose(got[12:], line, rtol=1e-6)


def test_a_warmdown_never_begins_before_the_warmup_has_ended():
    got = rates(LinearWarmdown(warmup_steps=15, warmdown=1.0))
    np.testing.assert_allclose(got[15:], PEAK * (1 - np.arange(6) / 5), atol=1e-7)


def test_a_run_may_be_all_warmup():
    got = rates(Cosine(warmup_steps=WARMUP), steps=WARMUP)
    np.testing.assert_allclose(got[:WARMUP], warmup(0.0), atol=1e-7)


def test_a_warmup_that_does_not_fit_the_run_is_named():
    with pytest.raises(UserError, match=r"warmup_steps must be .* = 20, got 21"):
        rates(Constant(warmup_steps=STEPS + 1))
    with pytest.raises(
        UserError, match=r"Constant\.warmup_steps: must be >= 0, got -1"
    ):
        Constant(warmup_steps=-1)


def test_a_share_of_steps_lies_between_none_and_all():
    with pytest.raises(ValueError, match=r"\.warmdown: must be >= 0 and <= 1, got 1.5"):
        LinearWarmdown(warmdown=1.5)
