import asyncio
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recurjax.errors import UserError
from recurjax.training.checkpoint import Checkpoints
from tests.training.checkpoint.cases import (
    abstract,
    assert_same,
    mesh,
    save_three_steps,
    state,
)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("three")
    save_three_steps(directory)
    return directory


@pytest.fixture
def copy(three_steps, tmp_path):
    return Path(shutil.copytree(three_steps, tmp_path / "run"))


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    values = np.linspace(-3, 200, 24).reshape(4, 6)
    dtypes = "float32 bfloat16 float16 float64 int32 uint32 int8 bool"
    with jax.enable_x64(True):
        tree = {"all": {name: jnp.asarray(values, name) for name in dtypes.split()}}
        special = [0.0, -0.0, np.nan, -np.nan, np.inf, 1e-45]
        tree["special"] = {"f": jnp.array(special, jnp.float32), "none": {}}
        tree["scalar"] = jnp.int32(-7)
        tree["empty"] = jnp.zeros((0, 3), jnp.bfloat16)
        checkpoints = Checkpoints(tmp_path / "run")
        checkpoints.save(5, tree, data_state={"read": [1, {"shard": "x"}]})
        restored = checkpoints.restore(abstract(tree))
        checkpoints.close()
    assert restored.step == 5
    assert restored.data_state == {"read": [1, {"shard": "x"}]}
    assert_same(restored.tree, tree)


def test_a_checkpoint_comes_back_on_another_mesh(tmp_path):
    tree = {"w": jnp.arange(64.0).reshape(8, 8), "v": jnp.arange(8), "n": jnp.int32(3)}
    specs = {"w": P("a", "b"), "v": P("b"), "n": P()}
    there = {k: NamedSharding(mesh(4, 2), s) for k, s in specs.items()}
    here = {k: NamedSharding(mesh(2, 4), s) for k, s in specs.items()}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, jax.device_put(tree, there), data_state={})
    wanted = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here[k])
        for k, x in tree.items()
    }
    restored = checkpoints.restore(wanted).tree
    checkpoints.close()
    assert_same(restored, tree)
    assert {k: x.sharding for k, x in restored.items()} == here


def test_parts_that_were_written_apart_are_read_as_one(tmp_path):
    """Here there is only one part; two are in tests/cli/test_buckets_of_two.py."""
    tree, read = {"w": jnp.arange(4096.0), "n": jnp.int32(3)}, []
    checkpoints = Checkpoints(tmp_path, apart=True, before_read=read.append)
    checkpoints.save(1, tree, data_state={})
    checkpoints.close()
    files = set(tmp_path.rglob("*"))
    arrays = tmp_path / "1" / "state"
    assert (arrays / "ocdbt.process_0" / "manifest.ocdbt").is_file()
    assert not (arrays / "manifest.ocdbt").exists()
    restored = Checkpoints(tmp_path, before_read=read.append).restore(abstract(tree))
    assert_same(restored.tree, tree)
    assert set(tmp_path.rglob("*")) == files and read == [1]


def test_a_save_holds_the_values_of_its_moment_though_buffers_are_donated(tmp_path):
    update = jax.jit(lambda t: jax.tree.map(lambda x: x * 2 + 1, t), donate_argnums=0)
    tree = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    want = jax.tree.map(np.asarray, {"w": jnp.arange(1 << 20, dtype=jnp.float32)})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree, data_state={})
    for _ in range(3):
        tree = update(tree)
    restored = checkpoints.restore(abstract(want))
    checkpoints.close()
    assert_same(restored.tree, want)


def test_a_part_is_read_alone(three_steps):
    wanted = abstract(state(3))
    restored = Checkpoints(three_steps).restore({"params": wanted["params"]})
    assert_same(restored.tree, {"params": state(3)["params"]})


def test_an_older_step_is_read_when_it_is_asked_for(three_steps):
    checkpoints = Checkpoints(three_steps)
    assert_same(checkpoints.restore(abstract(state(1)), step=1).tree, state(1))
    with pytest.raises(UserError, match=r"has no checkpoint 4; it has 1, 2, 3\."):
        checkpoints.restore(abstract(state(1)), step=4)


def test_saving_and_restoring_work_under_a_running_event_loop(tmp_path):
    async def notebook_cell():
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, state(1), data_state={})
        restored = checkpoints.restore(abstract(state(1)))
        checkpoints.close()
        return restored

    assert_same(asyncio.run(notebook_cell()).tree, state(1))


def test_nothing_is_printed_and_nothing_pickled(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("pickle.dumps", None)
    monkeypatch.setattr("pickle.dump", None)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), data_state={})
    checkpoints.restore(abstract(state(1)))
    checkpoints.close()
    assert capfd.readouterr() == ("", "")


def test_reading_changes_nothing_on_disk(tmp_path):
    directory = tmp_path / "run"
    checkpoints = Checkpoints(directory)
    assert checkpoints.restore(abstract(state(1))) is None
    assert (checkpoints.steps(), checkpoints.best_step()) == ([], None)
    checkpoints.close()
    assert not directory.exists()


def test_the_last_steps_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan")}
    for step, loss in losses.items():
        checkpoints.save(step, {"w": jnp.full(2, step)}, data_state={}, loss=loss)
    checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.best_step()) == ([2, 4, 5], 2)
    checkpoints.save(6, {"w": jnp.full(2, 6)}, data_state={}, loss=0.5)
    checkpoints.close()
    assert (checkpoints.steps(), checkpoints.best_step()) == ([5, 6], 6)
    assert sorted(os.listdir(tmp_path)) == ["5", "6"]


def test_the_best_step_goes_like_any_other_without_keep_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    checkpoints.save(1, {"w": jnp.ones(2)}, data_state={}, loss=0.1)
    checkpoints.save(2, {"w": jnp.ones(2)}, data_state={}, loss=0.2)
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_the_loss_may_follow_the_save(tmp_path):
    tree = {"w": jnp.ones(2)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree, data_state={"read": 1}, loss=2.0)
    checkpoints.save(2, tree, data_state={"read": 2})
    checkpoints.save(2, tree, data_state={"read": 2}, loss=1.0)
    assert checkpoints.best_step() == 2
    checkpoints.save(2, tree, data_state={"read": 2})
    assert checkpoints.best_step() == 2
    checkpoints.close()
    assert checkpoints.restore(abstract(tree)).data_state == {"read": 2}


def test_other_arrays_at_the_same_or_an_earlier_step_are_refused(copy):
    checkpoints = Checkpoints(copy)
    with pytest.raises(UserError, match=r"holds another checkpoint of step 3: move"):
        checkpoints.save(3, state(4), data_state={})
    with pytest.raises(UserError, match=r"holds checkpoint 3, which is later than"):
        checkpoints.save(2, state(2), data_state={})
    checkpoints.close()
    assert_same(Checkpoints(copy).restore(abstract(state(3))).tree, state(3))


@pytest.mark.parametrize(
    "tree, data_state, why",
    [
        ({"w": np.ones}, {}, "must be a jax.Array, got w=ndarray"),
        ({"a.b": jnp.ones}, {}, "keys must be without dots, got 'a.b'"),
        ({"w": lambda n: jnp.ones((0, n))}, {}, "must have at least one element"),
        ({"w": jnp.ones}, {"read": (1, 2)}, "data_state must be plain JSON"),
        ({"w": jnp.ones}, {"read": object()}, "data_state must be plain JSON"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, tree, data_state, why):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=why):
        leaves = {key: make(2) for key, make in tree.items()}
        checkpoints.save(1, leaves, data_state=data_state)
    checkpoints.close()


def test_keep_must_be_positive_and_shardings_are_explicit(three_steps):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(three_steps, keep=0)
    with pytest.raises(ValueError, match="params.b of abstract needs a sharding"):
        Checkpoints(three_steps).restore(jax.eval_shape(lambda: state(1)))


def test_the_manifest_is_plain_json_with_names_shapes_dtypes_and_checksums(three_steps):
    text = (three_steps / "3" / "manifest" / "manifest.json").read_text()
    entry = json.loads(text)["arrays"]["params.w"]
    assert (entry["shape"], entry["dtype"]) == ([64, 32], "float32")
    assert len(entry["checksum"]) == 16
