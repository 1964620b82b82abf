import dataclasses

import jax
import numpy as np
import pytest

from recurjax.parameters import to_nested_dict
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.training import session as session_module
from recurjax.training.checkpoint.manifest import named
from recurjax.training.session import Session
from tests.marks import slow_except
from tests.training.tiny_experiment import changed, config

# 4 query heads and 2 key heads: over tensor = 4 the key heads are replicated.
SHAPES = [(2, 2, 2), (1, 2, 4), (8, 1, 1), (1, 8, 1), (4, 1, 2)]


def experiment(shape):
    tiny = config()
    stack = dataclasses.replace(tiny.model.stack, layers=1)
    data, fsdp, tensor = shape
    return changed(
        dataclasses.replace(tiny, mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor)),
        model={"stack": stack},
        training={"accumulation": 2 if shape == (2, 2, 2) else 1},
    )


def train(shape, root, monkeypatch, steps=5):
    """Returns losses and parameters after a few steps on the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    monkeypatch.setattr(
        session_module, "make_mesh", lambda config: make_mesh(config, devices)
    )
    session = Session(experiment(shape), root)
    state, losses = session.start(print), []
    try:
        for _ in range(steps):
            state, metrics = session.step(state)
            losses.append(float(metrics["loss"]))
    finally:
        session.close()
    return losses, state.model


@pytest.fixture(scope="module")
def on_one_device(quick_compilation, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return train((1, 1, 1), tmp_path_factory.mktemp("one"), monkeypatch)


@pytest.mark.parametrize(
    "shape", slow_except(("(2, 2, 2)",), SHAPES, slow=["(1, 8, 1)"])
)
def test_every_mesh_gives_the_same_losses_and_parameters(
    shape, on_one_device, tmp_path, monkeypatch
):
    losses, model = train(shape, tmp_path, monkeypatch)
    np.testing.assert_allclose(losses, on_one_device[0], rtol=1e-5)
    got, want = named(to_nested_dict(model)), named(to_nested_dict(on_one_device[1]))
    for name in want:
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(
            got[name], want[name], rtol=0, atol=1e-5 * scale, err_msg=name
        )
    assert len(model.w_embedding[...].sharding.device_set) == np.prod(shape)
    weight = model.stack.blocks[0].mlp.w_up[...]
    (shard, *_) = weight.addressable_shards
    assert shard.data.size * shape[1] * shape[2] == weight.size
