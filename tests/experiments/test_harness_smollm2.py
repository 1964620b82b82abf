"""The comparison with the harness' own model: what it counts and how it times."""

from types import SimpleNamespace

import pytest

from experiments import harness_smollm2
from experiments.harness_smollm2 import HarnessAnswers, Timed, line, main
from recurjax.errors import UserError


def answers(right, log_p):
    return HarnessAnswers(
        seconds=2.0, figures={"acc,none": 0.5}, right=right, log_p=log_p
    )


def test_a_row_counts_the_items_that_both_answer_alike():
    ours = answers([1.0, 0.0, 0.0], [[-1.0, -2.0], [-3.0], [-4.0]])
    other = answers([1.0, 1.0, 0.0], [[-1.0, -2.5], [-3.0], [-4.1]])
    assert line("ours", ours) == "| ours | 2.0 | 1.50 | 0.500 |  |  |  |"
    assert line("hf", other, ours).endswith("| 0.500 |  | 2 of 3 | 5.0e-01 |")


def test_only_the_time_of_asking_counts(monkeypatch):
    clock = [0.0]

    def loglikelihood(seconds):
        clock[0] += seconds
        return [seconds]

    monkeypatch.setattr(harness_smollm2.time, "perf_counter", lambda: clock[0])
    side = Timed(SimpleNamespace(loglikelihood=loglikelihood))
    assert side.model.loglikelihood(2.0) == [2.0]
    clock[0] += 100.0
    side.model.loglikelihood(0.5)
    assert side.seconds == 2.5


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"lm_eval.* is not installed"):
        main([str(tmp_path), str(tmp_path)])
