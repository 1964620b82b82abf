"""A run that begins with another run's parameters."""

import dataclasses

import jax
import numpy as np
import pytest

from recurjax.convert.imported_run import new_experiment, write_run
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError
from recurjax.parameters import to_nested_dict
from recurjax.sharding import MeshConfig
from recurjax.training.run import check_start
from recurjax.training.session import Session
from tests.cli.commands import assert_refused, experiment_file, recurjax
from tests.training.tiny_experiment import changed, drawn
from tests.training.tiny_experiment import config as tiny


@pytest.fixture
def source(tmp_path):
    """An imported model of the tiny experiment's config."""
    out = tmp_path / "source"
    model = drawn(tiny().model)
    write_run(out, model, new_experiment(out, tiny().model, length=16), ByteTokenizer())
    return out, to_nested_dict(model)


@pytest.mark.parametrize(
    "mesh", [MeshConfig(), pytest.param(MeshConfig(fsdp=2), marks=pytest.mark.slow)]
)
def test_the_first_state_has_the_other_runs_parameters(
    source, mesh, tmp_path, quick_compilation
):
    out, want = source
    # The imported model computes in float32: its parameters enter this run's model.
    experiment = changed(
        tiny(),
        model={"dtype": "bfloat16"},
        training={"start_from": str(out)},
        mesh={"fsdp": mesh.fsdp},
    )
    session = Session(experiment, tmp_path / "run")
    said = []
    try:
        state = session.start(said.append)
        jax.tree.map(np.testing.assert_array_equal, to_nested_dict(state.model), want)
        assert int(state.step) == 0 and state.model.config == experiment.model
        assert said == [f"starting from the parameters of {out} at step 0"]
        session.save(state, 0)
    finally:
        session.close()
    # Once there is a checkpoint, the other run is not read again.
    out.rename(tmp_path / "moved")
    session = Session(experiment, tmp_path / "run")
    try:
        session.start(said.append)
    finally:
        session.close()
    assert len(said) == 1


def test_another_model_is_refused_with_all_differences(source, tmp_path):
    out, _ = source
    file = experiment_file(
        tmp_path,
        "import dataclasses; e = tiny(); stack = dataclasses.replace("
        "e.model.stack, layers=3, parallel_residual=True); return changed(e, "
        f"model={{'stack': stack}}, training={{'start_from': {str(out)!r}}})",
    )
    answer = recurjax("train", file, "--runs", tmp_path / "runs")
    assert_refused(
        answer,
        r"another model than this run \(stack.layers: 3 instead of 2; "
        "stack.parallel_residual: True instead of False",
    )
    assert not (tmp_path / "runs" / "tiny").exists()


def test_another_tokenizer_and_no_run_are_refused(source, tmp_path):
    out, _ = source
    ByteTokenizer(bos=False).save(out / "tokenizer")
    experiment = changed(tiny(), training={"start_from": str(out)})
    with pytest.raises(UserError, match="has 256 tokens and the model 257"):
        Session(experiment, tmp_path / "run")
    experiment = changed(tiny(), training={"start_from": str(tmp_path / "none")})
    with pytest.raises(UserError, match="none is not a run directory"):
        Session(experiment, tmp_path / "run")


def test_what_does_not_change_the_function_may_differ(source, tmp_path):
    out, _ = source
    stack = dataclasses.replace(tiny().model.stack, remat="block", unroll=2)
    experiment = changed(
        tiny(),
        model={"stack": stack, "dtype": "bfloat16"},
        training={"start_from": str(out)},
    )
    check_start(experiment, ByteTokenizer())


def test_the_other_run_may_lie_below_the_home(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    experiment = changed(tiny(), training={"start_from": f"~/{source[0].name}"})
    check_start(experiment, ByteTokenizer())


def test_training_in_the_imported_directory_is_refused(source):
    out, _ = source
    file = experiment_file(
        out.parent,
        f"return __import__('dataclasses').replace(tiny(), name={out.name!r})",
    )
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    answer = recurjax("train", file, "--runs", out.parent)
    assert_refused(
        answer, f"{out} holds an imported model, .* --training.start-from {out}"
    )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
