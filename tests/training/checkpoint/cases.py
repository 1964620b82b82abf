"""Small states that the tests of checkpoints save and compare."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, SingleDeviceSharding

from recurjax.training.checkpoint import Checkpoints


def one_device():
    return SingleDeviceSharding(jax.devices()[0])


def mesh(*shape):
    return jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def state(step):
    w = np.random.default_rng(step).standard_normal((64, 32), np.float32)
    tree = {"params": {"w": w, "b": np.full(3, step, np.float32)}, "step": step}
    return jax.tree.map(jnp.asarray, tree)


def abstract(tree, sharding=None):
    place = sharding or one_device()
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
    )


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_three_steps(directory):
    checkpoints = Checkpoints(directory)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), data_state={"read": step})
    checkpoints.close()
