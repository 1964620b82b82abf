import contextlib
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recurjax.errors import UserError
from recurjax.training.checkpoint import Checkpoints, Restored
from tests.source_tree import ROOT
from tests.training.checkpoint.cases import (
    abstract,
    assert_same,
    mesh,
    save_three_steps,
    state,
)

PYTHON = [sys.executable, "-W", "error", "-m", __name__]
"""This file as a process of its own."""


def child(*arguments, under=(), check=True):
    command = [*under, *PYTHON, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=check
    )


def test_a_write_that_fails_is_told_and_the_good_checkpoint_survives(tmp_path, capfd):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), data_state={})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        big = {name: jnp.ones(1 << 19) for name in "abcdefgh"}
        checkpoints.save(2, big, data_state={})
        with pytest.raises(UserError) as caught:
            checkpoints.save(3, state(3), data_state={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sentence = str(caught.value)
    assert sentence.startswith(f"checkpoint 2 could not be written to {tmp_path}: ")
    assert sentence.endswith("File too large; the last good checkpoint is 1.")
    assert os.listdir(tmp_path) == ["1"]
    checkpoints.save(3, state(3), data_state={})
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_is_told_and_the_good_checkpoint_survives(tmp_path):
    apart = ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=500k,nr_inodes=120 none '{tmp_path}'"
    try:
        subprocess.run([*apart, "sh", "-c", mount], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system of its own: {error}")
    shell = [*apart, "sh", "-c", f'{mount} && exec "$@"', "sh"]
    done = child("full_disk", tmp_path, under=shell)
    sentence = (
        f"checkpoint 2 could not be written to {tmp_path}: no space left on the device;"
        " the last good checkpoint is 1."
    )
    assert done.stdout.splitlines() == [sentence, sentence, "['1']", "1", "[1, 3]"]
    assert done.stderr == ""


def full_disk(directory):
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, state(1), data_state={})
    # Full while the arrays are written.
    checkpoints.save(2, {name: jnp.ones(1 << 14) for name in "abcdefgh"}, data_state={})
    try:
        checkpoints.wait()
    except UserError as error:
        print(error)
    # Full before the first directory is made.
    files = [Path(directory) / f"file-{i}" for i in range(120)]
    with contextlib.suppress(OSError):
        for file in files:
            file.touch()
    try:
        checkpoints.save(2, state(2), data_state={})
    except UserError as error:
        print(error)
    for file in files:
        file.unlink(missing_ok=True)
    print(os.listdir(directory))
    print(checkpoints.restore(abstract(state(1))).step)
    checkpoints.save(3, state(3), data_state={})
    checkpoints.close()
    print(checkpoints.steps())


def test_a_directory_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    with pytest.raises(
        UserError, match=r"run/checkpoints cannot be written: Not a dir"
    ):
        checkpoints.save(1, state(1), data_state={})
    checkpoints.close()


def test_a_directory_that_a_failed_writer_makes_at_the_last_moment_is_no_hindrance(
    tmp_path, monkeypatch
):
    paths = sys.modules["orbax.checkpoint._src.path.async_path"]
    look, results = paths.exists, []

    async def look_before_it_is_made(path):
        there = await look(path)
        if not results and path.name.endswith("-tmp"):
            results.append(path)
            path.mkdir(parents=True)
        return there

    monkeypatch.setattr(paths, "exists", look_before_it_is_made)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), data_state={})
    checkpoints.close()
    assert [path.name for path in results] == ["1.orbax-checkpoint-tmp"]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert_same(Checkpoints(tmp_path).restore(abstract(state(1))).tree, state(1))


def test_what_a_killed_save_leaves_is_ignored_and_removed_by_the_next_save(tmp_path):
    done = child("killed_while_saving", tmp_path, check=False)
    assert done.returncode == -9, done.stderr
    leftovers = [name for name in os.listdir(tmp_path) if name != "1"]
    assert leftovers, "the kill came too late"
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1]
    assert_same(checkpoints.restore(abstract(state(1))).tree, state(1))
    checkpoints.save(2, state(2), data_state={})
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def killed_while_saving(directory):
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, state(1), data_state={})
    big = {str(i): jnp.ones(1 << 20) for i in range(8)}
    checkpoints.save(2, big, data_state={})
    os.kill(os.getpid(), 9)


def test_a_killed_removal_is_ignored_and_finished_by_the_next_save(tmp_path):
    save_three_steps(tmp_path)
    (tmp_path / "1").rename(tmp_path / "1.removing")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(4, state(4), data_state={})
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "4"]


@pytest.mark.slow
def test_two_processes_save_what_one_restores(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*PYTHON, "one_of_two", str(tmp_path)]
    pair = [
        subprocess.Popen(
            [*command, str(port), str(rank)], cwd=ROOT, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    heard = [process.communicate(timeout=120)[0].decode() for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    # Step 3 is damaged in the part of process 1 only: both go back to step 2.
    for rank, text in enumerate(heard):
        assert f"rank {rank} step 2 data {{'rank': {rank}}} left out [3]" in text
    tree, _ = global_state(2)
    checkpoints = Checkpoints(tmp_path)
    restored = checkpoints.restore(abstract(tree), report=lambda said: None)
    assert restored.step == 2
    assert_same(restored.tree, jax.tree.map(np.asarray, tree))
    with pytest.raises(UserError, match="checkpoint 2 was saved by 2 processes"):
        _ = restored.data_state


def global_state(step):
    place = {"w": NamedSharding(mesh(4, 2), P("a", "b"))}

    def make():
        return {"w": jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64) * step}

    return jax.jit(make, out_shardings=place)(), place["w"]


def one_of_two(directory, port, rank):
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    checkpoints = Checkpoints(directory)
    for step in (1, 2, 3):
        tree, place = global_state(step)
        checkpoints.save(step, tree, data_state={"rank": int(rank)})
    checkpoints.wait()
    if rank == "1":
        part = Path(directory) / "3" / "state" / "ocdbt.process_1" / "d"
        max(part.iterdir(), key=lambda file: file.stat().st_size).write_bytes(b"")
    said = []
    restored = Checkpoints(directory).restore(abstract(tree, place), report=said.append)
    out = [int(sentence.split()[1]) for sentence in said]
    data = restored.data_state
    print(f"rank {rank} step {restored.step} data {data} left out {out}", flush=True)
    checkpoints.close()
    jax.distributed.shutdown()


def test_equal_data_states_serve_any_number_of_processes():
    assert Restored(1, {}, [{"read": 5}] * 4).data_state == {"read": 5}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
