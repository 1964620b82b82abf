import os
import signal

import pytest

from recurjax.training import loop as module
from recurjax.training.loop import Interruption


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "number, stop", [(signal.SIGTERM, "terminate"), (signal.SIGINT, "interrupt")]
)
def test_a_signal_becomes_a_stop_that_stays(number, stop):
    with Interruption() as interruption:
        assert not interruption.requested()
        send(number)
        assert interruption.requested() and interruption.requested()
        assert interruption.stop == stop


def test_a_second_interrupt_stops_at_once():
    with pytest.raises(KeyboardInterrupt), Interruption():
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_the_handlers_before_come_back():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with Interruption():
        send(signal.SIGTERM)
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def several(monkeypatch):
    """Three polls pass before the processes agree, as jax's service says it: once."""
    polls = []

    def reached(step):
        polls.append(step)
        return step == 3

    monkeypatch.setattr(module.jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        module.multihost_utils, "reached_preemption_sync_point", reached
    )
    return polls


def test_several_processes_stop_at_the_poll_they_agreed_on_and_stay_stopped(several):
    with Interruption() as interruption:
        said = [interruption.requested() for _ in range(5)]
    assert said == [False, False, True, True, True]
    assert interruption.stop == "terminate"
    assert several == [1, 2, 3]


def test_ctrl_c_of_one_process_is_passed_on_as_sigterm(several):
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with Interruption() as interruption:
            send(signal.SIGINT)
            said = [interruption.requested() for _ in range(3)]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    assert said == [False, False, True] and interruption.stop == "interrupt"
