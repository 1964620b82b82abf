"""Two processes over loopback, started as a user starts them: by the environment."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cli.commands import recurjax
from tests.training import tiny_experiment
from tests.training.compilation import quick_compilation
from tests.training.run_contents import arrays, assert_same_run, metrics

__all__ = ["quick_compilation"]


def start(env, runs, *options):
    """Starts two processes of two devices each on one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "recurjax.cli.main", "train"]
    command += [tiny_experiment.__file__, "--runs", str(runs), *options]
    place = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONUNBUFFERED": "1",
    }
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**env, **place, "JAX_PROCESS_ID": str(rank)},
        )
        for rank in range(2)
    ]


def finish(pair, timeout=200):
    """Returns what the two said; each must have ended with exit code 0."""
    try:
        said = [process.communicate(timeout=timeout)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], said
    return said


@pytest.fixture(scope="module")
def pair_run(quick_compilation, tmp_path_factory):
    runs = tmp_path_factory.mktemp("pair")
    said = finish(start(quick_compilation, runs, "--mesh.fsdp", "2"))
    return runs / "tiny", said


@pytest.fixture(scope="module")
def alone(quick_compilation, tmp_path_factory):
    """The same run in this process, on its eight devices."""
    runs = tmp_path_factory.mktemp("alone")
    assert recurjax("train", tiny_experiment.__file__, "--runs", runs)[0] == 0
    return runs / "tiny"


def test_two_processes_make_the_losses_of_one(pair_run, alone):
    run, said = pair_run
    assert f"finished at step 12: {run}" in said[0]
    assert "step 12/12" in said[0] and "step 12/12" not in said[1]
    got, want = metrics(run), metrics(alone)
    assert [(r["step"], r["kind"]) for r in got] == [
        (r["step"], r["kind"]) for r in want
    ]
    losses = ([row["loss"] for row in rows] for rows in (got, want))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_two_processes_saved_they_resume(pair_run, quick_compilation, tmp_path):
    run = shutil.copytree(pair_run[0], tmp_path / "tiny")
    shutil.rmtree(run / "checkpoints" / "12")
    said = finish(start(quick_compilation, tmp_path, "--mesh.fsdp", "2"))
    assert "resuming at step 9 of 12" in said[0]
    assert_same_run(run, pair_run[0])


@pytest.mark.slow
def test_sigterm_to_one_process_makes_both_save_and_exit(quick_compilation, tmp_path):
    options = ["--training.steps", "1000000", "--evaluation.every", "0"]
    options += ["--training.checkpoint-every", "200"]
    pair = start(quick_compilation, tmp_path, *options)
    saved, limit = tmp_path / "tiny" / "checkpoints" / "200", time.monotonic() + 120
    while not saved.is_dir() and time.monotonic() < limit and pair[0].poll() is None:
        time.sleep(0.1)
    os.kill(pair[1].pid, signal.SIGTERM)
    said = finish(pair)
    step, contents = arrays(tmp_path / "tiny")
    assert contents["step"] == step > 200
    for text in said:
        assert f"terminated at step {step}, saved in {tmp_path}/tiny" in text
