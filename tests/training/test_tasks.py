"""A run on a task: accuracies, resuming to the bit, evaluate and generate."""

import dataclasses
import json
import re
import shutil

import pytest

from recurjax.data.tasks import InContextRecall, StateTracking, TaskData
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.layers.position import LearnedPositions
from recurjax.training.loop import train
from recurjax.training.run import RunDirectory, load_run
from tests.cli.commands import assert_refused, recurjax
from tests.training.run_contents import assert_same_run, metrics
from tests.training.tiny_experiment import changed
from tests.training.tiny_experiment import config as tiny

TASK = InContextRecall(length=16, train_rows=64, validation_rows=20)


def experiment(task=TASK, **sections) -> Experiment:
    text = tiny()
    model = dataclasses.replace(text.model, vocabulary=task.vocabulary)
    run = dataclasses.replace(text, model=model, data=TaskData(task=task, prefetch=0))
    return changed(run, evaluation={"batches": None}, **sections)


@pytest.fixture(scope="module")
def run(quick_compilation, tmp_path_factory):
    root = tmp_path_factory.mktemp("task")
    assert train(experiment(), root).outcome == "finished"
    return root


@pytest.mark.slow
def test_metrics_have_accuracies_and_no_bits_a_byte(run):
    rows = [row for row in metrics(run) if row["kind"] == "validation"]
    assert [row["step"] for row in rows] == [4, 8, 12]
    for row in rows:
        assert 0 <= row["sequence_accuracy"] <= row["accuracy"] <= 1
        assert 0 <= row["class_accuracy"] <= 1 and "bits_per_byte" not in row
        assert 0.2 < row["accuracy_floor"] < 0.5


def test_the_log_says_that_nothing_is_recalled_yet(run):
    log = RunDirectory(run).log.read_text()
    assert "(floor 0." in log
    # Twelve steps teach nothing: said from the second evaluation on.
    said = re.findall(r"step (\d+): the accuracy is still at the task's floor", log)
    assert said == ["8", "12"]


def test_a_run_in_two_parts_is_the_same_run(run, tmp_path):
    root = shutil.copytree(run, tmp_path / "run")
    for step in ("9", "12"):
        shutil.rmtree(root / "checkpoints" / step)
    result = train(experiment(), root)
    assert (result.outcome, result.step) == ("finished", 12)
    assert_same_run(root, run)


def test_evaluate_tells_the_accuracy_of_every_place(run):
    code, out, _ = recurjax("evaluate", run, "--batch", 8)
    report = json.loads(out)["accuracy"]
    assert code == 0 and report["rows"] == 20 and len(report["positions"]) == 16
    last = [row for row in metrics(run) if row["kind"] == "validation"][-1]
    assert report["token"] == pytest.approx(last["accuracy"], abs=1e-6)
    assert_refused(
        recurjax("evaluate", run, "--text", __file__),
        "--text is for runs trained on text",
    )


def test_the_runs_tokens_are_numbers(run):
    loaded = load_run(run)
    assert loaded.tokenizer.vocabulary == 16
    code, out, _ = recurjax(
        "generate", run, "--prompt", "3 9 3", "--max-new-tokens", "4"
    )
    assert code == 0 and all(word.isdigit() for word in out.split()[-4:])
    assert_refused(recurjax("generate", run, "--prompt", "three"), "not a symbol")


@pytest.mark.slow
def test_rows_to_test_on_may_be_longer_than_those_to_learn_from(
    quick_compilation, tmp_path
):
    task = StateTracking(length=16, validation_length=32, validation_rows=9)
    result = train(experiment(task, training={"steps": 4}), tmp_path / "run")
    assert result.outcome == "finished" and result.score is not None
    assert len(result.score.accuracy.positions) == 32
    assert result.score.accuracy.rows == 9


def test_rows_longer_than_learned_positions_are_refused(tmp_path):
    short = experiment(StateTracking(length=16, validation_length=32))
    attention = dataclasses.replace(
        short.model.stack.attention, position=LearnedPositions(length=16)
    )
    stack = dataclasses.replace(short.model.stack, attention=attention)
    short = changed(short, model={"stack": stack})
    with pytest.raises(UserError, match="a validation row of 32 tokens exceeds"):
        train(short, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
