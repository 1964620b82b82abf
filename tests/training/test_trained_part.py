"""`training.train_only`: what is not trained stays as it is, in every way."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recurjax.errors import UserError
from recurjax.parameters import parameter_name, to_nested_dict
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training import session as session_module
from recurjax.training.checkpoint.manifest import named
from recurjax.training.objective import NextToken
from recurjax.training.optimizers import AdamW, MuonAdamW, build_optimizer
from recurjax.training.program import build_step
from recurjax.training.session import Session
from recurjax.training.spikes import SpikeConfig
from recurjax.training.step import first_state, train_step
from recurjax.types import Batch
from tests.cli.commands import TINY, assert_refused, recurjax
from tests.compiling import QUICK_COMPILE
from tests.training.run_contents import assert_same_run
from tests.training.test_resume import train
from tests.training.tiny_experiment import changed, config, drawn

PATTERN = r"mlp|final_norm"


def experiment(**training):
    return changed(
        config(),
        optimizer={"decay": "all"},
        training={"train_only": PATTERN, "steps": 6} | training,
        evaluation={"every": 0},
    )


def chosen(name):
    return "mlp" in name or "final_norm" in name


def test_the_rest_keeps_its_bits_and_has_no_moments(quick_compilation, tmp_path):
    session = Session(experiment(), tmp_path)
    try:
        state = session.start(print)
        before = {n: np.asarray(x) for n, x in named(to_nested_dict(state)).items()}
        state, _ = session.step(session.step(state)[0])
    finally:
        session.close()
    met = {True: 0, False: 0}
    for name, array in named(to_nested_dict(state)).items():
        same = np.asarray(array).tobytes() == before[name].tobytes()
        if name.startswith("model."):
            assert same != chosen(name), name
            met[chosen(name)] += 1
        elif "stack" in name or "norm" in name or "embedding" in name:
            assert chosen(name) and not same, name
    assert met == {True: 5, False: 6}


@pytest.mark.slow
def test_a_run_stopped_on_the_way_and_resumed_is_the_same(quick_compilation, tmp_path):
    train(tmp_path / "whole", experiment=experiment())
    train(tmp_path / "parts", stop_at_poll=4, experiment=experiment())
    train(tmp_path / "parts", experiment=experiment())
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_the_trained_part_moves_as_under_optaxs_masks(parts):
    """Without clipping, freezing by masks of the full gradient gives the same."""
    model = drawn(config().model, scale=0.2)
    ids = np.random.default_rng(0).integers(257, size=(4, 8)).astype(np.int32)
    batch = Batch(jnp.asarray(ids), jnp.asarray(ids))
    optimizer = build_optimizer(
        AdamW(learning_rate=1e-2, decay="all"), lambda _: 1e-2, clip=None, steps=4
    )
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: str(chosen(parameter_name(path))), model
    )
    masks = optax.partition(
        {"True": optimizer, "False": optax.set_to_zero()},
        lambda _: labels,
    )
    spikes = SpikeConfig()
    ends = []
    for transformation, pattern in ((optimizer, PATTERN), (masks, None)):
        step = partial(
            train_step,
            objective=NextToken(),
            optimizer=transformation,
            spikes=spikes,
            accumulation=parts,
            train_only=pattern,
        )
        step = jax.jit(step, compiler_options=QUICK_COMPILE)
        state = first_state(model, transformation, spikes, pattern)
        for _ in range(3):
            state, _ = step(state, batch)
        ends.append(named(to_nested_dict(state.model)))
    for name, want in ends[1].items():
        np.testing.assert_allclose(ends[0][name], want, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(AdamW(learning_rate=1e-2), marks=pytest.mark.sweep), MuonAdamW()],
)
def test_every_mesh_trains_the_same_part(
    optimizer, tmp_path, monkeypatch, quick_compilation
):
    ends = []
    for data, fsdp, tensor in ((1, 1, 1), (2, 2, 2)):
        mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
        run = dataclasses.replace(experiment(), optimizer=optimizer, mesh=mesh)
        devices = jax.devices()[: data * fsdp * tensor]
        monkeypatch.setattr(
            session_module,
            "make_mesh",
            lambda config, devices=devices: make_mesh(config, devices),
        )
        session = Session(run, tmp_path / str(data))
        try:
            state = session.start(print)
            before = {n: np.asarray(x) for n, x in named(to_nested_dict(state)).items()}
            for _ in range(3):
                state, _ = session.step(state)
        finally:
            session.close()
        after = named(to_nested_dict(state))
        for name in after:
            if name.startswith("model.") and not chosen(name):
                np.testing.assert_array_equal(after[name], before[name])
        ends.append(after)
    for name, want in ends[0].items():
        scale = np.abs(want).max(initial=1e-9)
        np.testing.assert_allclose(
            ends[1][name], want, rtol=0, atol=1e-4 * scale, err_msg=name
        )


def test_what_names_nothing_to_train_is_one_sentence(tmp_path, monkeypatch):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(UserError, match="'mamba' matches no parameter: .* w_embedding"):
        build_step(experiment(train_only="mamba"), mesh)
    for pattern, said in (
        ("mamba", "training.train_only 'mamba' matches no parameter"),
        ("(", "training.train_only must be a regular expression"),
    ):
        monkeypatch.chdir(tmp_path)
        answer = recurjax("train", TINY, "--training.train-only", pattern)
        assert_refused(answer, said)
