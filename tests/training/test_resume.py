import dataclasses
import io
import shutil

import numpy as np
import pytest
from rich.console import Console

from recurjax.errors import UserError
from recurjax.experiment import read_experiment
from recurjax.sharding import MeshConfig
from recurjax.training import loop
from recurjax.training.checkpoint.manifest import Manifest
from recurjax.training.loop import Interruption
from recurjax.training.optimizers import Constant
from recurjax.training.session import Session
from recurjax.training.spikes import SpikeConfig
from tests.training.run_contents import arrays, assert_same_run, metrics
from tests.training.tiny_experiment import changed, config


def train(root, *, stop_at_poll=None, experiment=None):
    """Trains; a signal comes just before the loop asks for the nth time."""

    class Signalled(Interruption):
        polls = 0

        def requested(self):
            self.polls += 1
            if self.polls == stop_at_poll:
                self.stop = "terminate"
            return super().requested()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Interruption", Signalled)
        console = Console(file=io.StringIO(), width=200)
        return loop.train(experiment or config(), root, console=console)


@pytest.fixture(scope="module")
def whole(quick_compilation, tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    assert train(root).outcome == "finished"
    return root


@pytest.fixture(scope="module")
def stopped(quick_compilation, tmp_path_factory):
    """A run that was stopped after step 7, and twice before."""
    root = tmp_path_factory.mktemp("stopped")
    # The loop asks before each step, and after each of an evaluation's two batches.
    for poll, step in ((3, 2), (3, 4), (6, 7)):
        result = train(root, stop_at_poll=poll)
        assert (result.outcome, result.step) == ("terminated", step)
    return root


def test_a_run_past_its_last_step_is_refused_and_left_as_it_was(
    quick_compilation, tmp_path
):
    constant = dataclasses.replace(config(), schedule=Constant())
    session = Session(constant, tmp_path)
    try:
        session.save(session.start(print), 5)
    finally:
        session.close()
    # Of a step after the checkpoint: a run that goes on makes it again.
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "kind": "train"}\n')
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    shorter = changed(constant, training={"steps": 4, "log_every": 7})
    session = Session(shorter, tmp_path)
    try:
        with pytest.raises(UserError, match="is at step 5 already, .* is 4: raise"):
            session.start(print)
    finally:
        session.close()
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == before
    session = Session(changed(shorter, training={"steps": 6}), tmp_path)
    try:
        session.start(print)
    finally:
        session.close()
    stored = read_experiment(tmp_path / "config.json").training
    assert (stored.steps, stored.log_every) == (6, 7)
    assert metrics(tmp_path) == []


def files_of(root):
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_run_stopped_anywhere_and_resumed_is_the_same_run(whole, stopped, tmp_path):
    root = shutil.copytree(stopped, tmp_path / "run")
    result = train(root, stop_at_poll=8)  # in the evaluation after the last step
    assert (result.outcome, result.step) == ("terminated", 12)
    assert [row["step"] for row in metrics(root) if row["kind"] == "validation"] == [
        4,
        8,
    ]
    result = train(root)
    assert (result.outcome, result.step) == ("finished", 12)
    assert result.score is not None
    assert_same_run(root, whole)


def test_an_evaluation_that_was_interrupted_is_made_first(stopped):
    # The second stop came in the evaluation of step 4.
    rows = [(row["step"], row["kind"]) for row in metrics(stopped)]
    steps = [(step, "train") for step in range(1, 8)]
    assert rows == [*steps[:4], (4, "validation"), *steps[4:]]


def test_rows_of_a_run_killed_before_its_first_checkpoint_are_made_anew(
    whole, stopped, tmp_path
):
    root = shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree(root / "checkpoints")
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "kind": "tr')  # where the kill came
    train(root)
    assert_same_run(root, whole)


def test_a_finished_run_is_left_as_it_is(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    result = train(whole)
    assert (result.outcome, result.step, result.score) == ("finished", 12, None)
    assert (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh(whole, stopped, tmp_path):
    root = shutil.copytree(stopped, tmp_path / "run")
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    train(root, experiment=dataclasses.replace(config(), mesh=mesh))
    got, want = ([row["loss"] for row in metrics(run)] for run in (root, whole))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    (_, got), (_, want) = arrays(root), arrays(whole)
    for name in want:
        # Adam's quotient of two small sums enlarges what rounding does to them.
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(
            got[name], want[name], rtol=0, atol=1e-3 * scale, err_msg=name
        )


@pytest.mark.slow
def test_a_run_goes_on_with_another_spike_rule_and_other_evaluations(stopped, tmp_path):
    root = shutil.copytree(stopped, tmp_path / "run")
    rule = SpikeConfig(window=16, sigma=9.0, patience=4)
    other = changed(config(), training={"spikes": rule}, evaluation={"every": 6})
    assert train(root, experiment=other).outcome == "finished"
    assert read_experiment(root / "config.json").training.spikes == rule
    steps = [row["step"] for row in metrics(root) if row["kind"] == "validation"]
    assert steps == [4, 12]
    # The window of the new rule began at step 8; the count of updates went on.
    _, saved = arrays(root)
    assert int(saved["spikes.known"]) == 5 and int(saved["spikes.accepted"]) == 12


def test_a_checkpoint_of_a_rule_that_remembered_less_goes_on(
    stopped, tmp_path, monkeypatch
):
    """Earlier versions had neither `known` nor `rejected`."""
    root = shutil.copytree(stopped, tmp_path / "run")
    stripped = Manifest.without_other

    def without(manifest, wanted, optional):
        arrays = {n: a for n, a in manifest.arrays.items() if n != "spikes.known"}
        return stripped(dataclasses.replace(manifest, arrays=arrays), wanted, optional)

    monkeypatch.setattr(Manifest, "without_other", without)
    assert train(root).outcome == "finished"
    _, saved = arrays(root)
    assert int(saved["spikes.known"]) == 5 and int(saved["spikes.accepted"]) == 12
