"""A wavefront over devices: training on stages of layers."""

import dataclasses

import jax
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.layers.mlp import MlpConfig
from recurjax.parameters import to_nested_dict
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training import session as session_module
from recurjax.training.checkpoint.manifest import named
from recurjax.training.session import Session
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from tests.training.tiny_experiment import changed, config

LAYERS = 2


def experiment(*, stage: int, data: int = 1, schedule="wavefront", layers=LAYERS):
    stack = RecurrentTransformerConfig(
        layers=layers,
        width=16,
        heads=4,
        key_heads=4,
        head_width=4,
        mlp=MlpConfig(width=32),
        schedule=schedule,
        tile=8,
    )
    mesh = MeshConfig(data=data, stage=stage)
    tiny = dataclasses.replace(config(), mesh=mesh)
    return changed(tiny, model={"stack": stack})


def train(root, monkeypatch, *, data: int, stage: int):
    """Returns losses, a validation loss and the state after a few steps."""
    devices = jax.devices()[: data * stage]
    monkeypatch.setattr(
        session_module, "make_mesh", lambda config: make_mesh(config, devices)
    )
    session = Session(experiment(stage=stage, data=data), root)
    state, losses = session.start(print), []
    try:
        for _ in range(3):
            state, metrics = session.step(state)
            losses.append(float(metrics["loss"]))
        validation = session.evaluate(state, between=lambda: None).loss
        return losses, validation, state
    finally:
        session.close()


@pytest.mark.slow  # Two programs of a full training step.
def test_stages_train_as_one_device_does(quick_compilation, tmp_path, monkeypatch):
    want = train(tmp_path / "one", monkeypatch, data=1, stage=1)
    got = train(tmp_path / "four", monkeypatch, data=2, stage=2)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    ours, theirs = (named(to_nested_dict(state.model)) for _, _, state in (got, want))
    for name, leaf in theirs.items():
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(
            ours[name], leaf, rtol=0, atol=1e-5 * scale, err_msg=name
        )
    stacked = [
        leaf
        for tree in (got[2].model, got[2].optimizer)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if "blocks" in jax.tree_util.keystr(path)
    ]
    assert len(stacked) > 20
    for leaf in stacked:
        held = {shard.data.shape[0] for shard in leaf.addressable_shards}
        assert held == {LAYERS // 2}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"stage": 2, "layers": 3},
            "mesh.stage must divide the model's 3 layers, got 2",
        ),
        ({"stage": 2, "schedule": "prefix"}, "got 2 stages and schedule prefix"),
        ({"stage": 2, "schedule": None}, "set --model.stack.schedule wavefront"),
    ],
)
def test_stages_that_do_not_fit_are_told(wrong, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Session(experiment(data=4, **wrong), tmp_path)


def test_another_variant_has_no_stages(tmp_path):
    other = dataclasses.replace(config(), mesh=MeshConfig(data=4, stage=2))
    with pytest.raises(UserError, match="TransformerConfig does not have"):
        Session(other, tmp_path)
