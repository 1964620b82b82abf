import functools
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.errors import UserError
from recurjax.training.checkpoint import Checkpoints, manifest
from tests.training.checkpoint.cases import (
    abstract,
    assert_same,
    one_device,
    save_three_steps,
    state,
)
from tests.training.tiny_experiment import config


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("three")
    save_three_steps(directory)
    return directory


@pytest.fixture
def copy(three_steps, tmp_path):
    return Path(shutil.copytree(three_steps, tmp_path / "run"))


def file_of_w(directory, step):
    """The file that holds the bytes of params.w, and where they begin."""
    start = np.asarray(state(step)["params"]["w"]).tobytes()[:64]
    for file in sorted((directory / str(step) / "state").rglob("*")):
        if file.is_file() and (at := file.read_bytes().find(start)) >= 0:
            return file, at
    raise AssertionError("params.w is in no file")


def flip_a_bit(directory, step):
    file, at = file_of_w(directory, step)
    data = bytearray(file.read_bytes())
    data[at + 1001] ^= 4
    file.write_bytes(data)


def truncate(directory, step):
    file, at = file_of_w(directory, step)
    file.write_bytes(file.read_bytes()[: at + 100])


def lose_a_file(directory, step):
    file_of_w(directory, step)[0].unlink()


def garble_the_manifest(directory, step):
    file = directory / str(step) / "manifest" / "manifest.json"
    file.write_text(file.read_text().replace('"shape": [64, 32]', '"shape": [32, 64]'))


def lose_the_manifest(directory, step):
    (directory / str(step) / "manifest" / "manifest.json").unlink()


def put_another_in_its_place(directory, step):
    shutil.rmtree(directory / str(step))
    shutil.copytree(directory / "1", directory / str(step))


@pytest.mark.parametrize(
    "harm, why",
    [
        (put_another_in_its_place, "its manifest is a copy of that of step 1"),
        (flip_a_bit, r"wrong checksum of params\.w"),
        (truncate, "its arrays cannot be read"),
        (lose_a_file, "its arrays cannot be read"),
        (garble_the_manifest, "the manifest's digest does not match"),
        (lose_the_manifest, "its manifest cannot be read, No such file"),
    ],
)
def test_a_damaged_step_is_left_out_aloud(copy, harm, why, capfd):
    harm(copy, 3)
    said = []
    checkpoints = Checkpoints(copy)
    restored = checkpoints.restore(abstract(state(3)), report=said.append)
    assert (restored.step, restored.data_state) == (2, {"read": 2})
    assert_same(restored.tree, state(2))
    assert len(said) == 1
    assert said[0].startswith(f"Checkpoint 3 in {copy} is damaged and is left out: ")
    assert re.search(why, said[0])
    assert checkpoints.steps() == [1, 2]
    assert sorted(os.listdir(copy)) == ["1", "2", "3"]
    assert capfd.readouterr() == ("", "")


def test_a_damaged_step_is_set_aside_by_the_next_save_and_never_removed(copy):
    flip_a_bit(copy, 3)
    checkpoints = Checkpoints(copy, keep=1)
    checkpoints.restore(abstract(state(3)), report=lambda said: None)
    checkpoints.save(3, state(3), data_state={})
    checkpoints.save(4, state(4), data_state={})
    checkpoints.close()
    assert sorted(os.listdir(copy)) == ["3.damaged", "4"]


def test_with_no_good_step_each_fault_is_named(copy):
    flip_a_bit(copy, 3)
    truncate(copy, 2)
    lose_the_manifest(copy, 1)
    with pytest.raises(UserError) as caught:
        Checkpoints(copy).restore(abstract(state(3)), report=lambda said: None)
    sentence = str(caught.value)
    assert sentence.startswith(f"{copy} holds no good checkpoint (3: wrong checksum of")
    assert "; 2: its arrays cannot be read" in sentence
    assert "; 1: its manifest cannot be read" in sentence
    assert "\n" not in sentence


def test_a_copy_under_another_number_is_no_best_step(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), data_state={}, loss=float(step))
    checkpoints.wait()
    shutil.copytree(tmp_path / "1", tmp_path / "9")
    assert checkpoints.best_step() == 1
    checkpoints.close()


def test_a_manifest_of_the_format_before_is_read(copy):
    file = copy / "3" / "manifest" / "manifest.json"
    content = json.loads(file.read_text())
    del content["model"], content["digest"]
    content["format"] = 1
    file.write_text(json.dumps({**content, "digest": manifest._digest(content)}))
    assert Checkpoints(copy, model=config().model).restore(abstract(state(3))).step == 3


def test_an_incomplete_step_counts_for_nothing(copy):
    (copy / "3" / "commit_success.txt").unlink()
    said = []
    checkpoints = Checkpoints(copy)
    assert checkpoints.restore(abstract(state(3)), report=said.append).step == 2
    assert said == [f"Checkpoint 3 in {copy} is incomplete and is left out."]
    checkpoints.save(3, state(3), data_state={})
    checkpoints.close()
    assert sorted(os.listdir(copy)) == ["1", "2", "3", "3.incomplete"]
    assert Checkpoints(copy).restore(abstract(state(3))).step == 3


def test_differences_are_named_at_once_and_nothing_else_is_tried(three_steps):
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=one_device())
    wanted = abstract(state(3))
    wanted["params"]["w"] = struct((64, 33), jnp.float32)
    wanted["params"]["scale"] = wanted["params"].pop("b")
    wanted["step"] = struct((), jnp.float32)
    said = []
    with pytest.raises(UserError) as caught:
        Checkpoints(three_steps).restore(wanted, report=said.append)
    assert str(caught.value) == (
        f"checkpoint 3 in {three_steps} does not fit this configuration:"
        " params.b is in the checkpoint only;"
        " params.scale is not in the checkpoint;"
        " params.w is float32[64,32] in the checkpoint, not float32[64,33];"
        " step is int32[] in the checkpoint, not float32[]."
    )
    assert said == []
    wanted["params"] |= {f"p{n:03}": wanted["step"] for n in range(300)}
    with pytest.raises(UserError, match="p001 is not in .*; and 298 more.$") as caught:
        Checkpoints(three_steps).restore(wanted)
    assert len(str(caught.value)) < 500 + len(str(three_steps))
