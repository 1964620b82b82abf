"""Two processes over loopback, started as a user starts them: by the environment."""

import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from recurjax.machine import distributed
from tests.cli.commands import assert_refused, recurjax
from tests.metadata_server import host, metadata_server
from tests.pairs import environment, free_port, places
from tests.training import tiny_experiment
from tests.training.compilation import quick_compilation
from tests.training.run_contents import arrays, assert_same_run, metrics
from tests.training.tiny_run import finished_tiny_run

__all__ = ["quick_compilation"]


def start(env, runs, *options):
    """Starts two processes of two devices each on one run."""
    return _start("recurjax", env, places(), runs, *options)


def start_slice(env, servers, runs, *options):
    """Starts the same on two hosts of a TPU slice, of which only jax can know."""
    place = {"JAX_COORDINATOR_PORT": str(free_port()), "JAX_FORCE_TPU_INIT": "1"}
    each = [place | {"GCE_METADATA_IP": server} for server in servers]
    return _start("tests.metadata_server", env, each, runs, *options)


def _start(module, env, places, runs, *options):
    command = [sys.executable, "-m", module, "train"]
    command += [tiny_experiment.__file__, "--runs", str(runs), *options]
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**env, **environment(2), **place},
        )
        for place in places
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
    """The same run in one process, on its eight devices."""
    return finished_tiny_run(tmp_path_factory)


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_what_two_processes_saved_they_resume(pair_run, quick_compilation, tmp_path):
    run = shutil.copytree(pair_run[0], tmp_path / "tiny")
    shutil.rmtree(run / "checkpoints" / "12")
    said = finish(start(quick_compilation, tmp_path, "--mesh.fsdp", "2"))
    assert "resuming at step 9 of 12" in said[0]
    assert_same_run(run, pair_run[0])


ENDLESS = ["--training.steps", "1000000", "--evaluation.every", "0"]
ENDLESS += ["--training.checkpoint-every", "200"]


def stop_when_saved(pair, run, step=200):
    """Sends one process SIGTERM after that save; returns the step both reached."""
    saved, limit = run / "checkpoints" / str(step), time.monotonic() + 120
    while not saved.is_dir() and time.monotonic() < limit and pair[0].poll() is None:
        time.sleep(0.1)
    os.kill(pair[1].pid, signal.SIGTERM)
    said = finish(pair)
    reached, contents = arrays(run)
    assert contents["step"] == reached > step
    for text in said:
        assert f"terminated at step {reached}, saved in {run}" in text
    return reached, said


@pytest.mark.sweep
def test_sigterm_to_one_process_makes_both_save_and_exit(quick_compilation, tmp_path):
    pair = start(quick_compilation, tmp_path, *ENDLESS)
    stop_when_saved(pair, tmp_path / "tiny")


@pytest.mark.sweep
def test_hosts_of_a_tpu_slice_join_save_on_sigterm_and_resume(
    quick_compilation, tmp_path
):
    with metadata_server(host(0, 2)) as first, metadata_server(host(1, 2)) as second:
        servers = (first, second)
        pair = start_slice(quick_compilation, servers, tmp_path, *ENDLESS)
        step, _ = stop_when_saved(pair, tmp_path / "tiny")
        pair = start_slice(quick_compilation, servers, tmp_path, *ENDLESS)
        later = 200 * (step // 200 + 1)
        _, said = stop_when_saved(pair, tmp_path / "tiny", later)
    assert f"resuming at step {step} of 1000000" in said[0]


@pytest.fixture
def on_tpu_vm(monkeypatch):
    """Makes this process one of a TPU VM whose metadata server is named later."""
    for name in distributed_variables():
        monkeypatch.delenv(name, raising=False)
    module = distributed.cloud_tpu_init
    monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    return monkeypatch


def distributed_variables():
    names = ("TPU_SKIP_MDS_QUERY", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    return (*names, "MEGASCALE_NUM_SLICES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_tpu_vm_asks_the_metadata_server_for_its_slice(on_tpu_vm, hosts):
    with metadata_server(host(0, hosts)) as server:
        on_tpu_vm.setenv("GCE_METADATA_IP", server)
        assert distributed._has_peers() == (hosts > 1)


def test_several_slices_of_one_host_are_several_processes(on_tpu_vm):
    attributes = host(0, 1)
    attributes["tpu-env"] += "\nMEGASCALE_NUM_SLICES: '2'"
    with metadata_server(attributes) as server:
        on_tpu_vm.setenv("GCE_METADATA_IP", server)
        assert distributed._has_peers()


@pytest.mark.parametrize(("code", "requests"), [(404, 1), (503, 3)])
def test_an_attribute_that_is_missing_is_asked_for_once(on_tpu_vm, code, requests):
    """A server that is not ready yet gets three requests."""
    codes = []

    def fails(_, request, timeout):
        codes.append(code)
        raise distributed.urllib.error.HTTPError(
            request.full_url, code, "", request.headers, None
        )

    on_tpu_vm.setattr(distributed.urllib.request.OpenerDirector, "open", fails)
    assert not distributed._has_peers()
    assert codes == [code] * requests


def test_a_tpu_vm_without_a_metadata_server_is_alone_after_few_short_tries(on_tpu_vm):
    waits = []

    def refused(_, request, timeout):
        waits.append(timeout)
        raise ConnectionRefusedError(request.full_url)

    on_tpu_vm.setattr(distributed.urllib.request.OpenerDirector, "open", refused)
    assert not distributed._has_peers()
    assert waits == [2.0] * 3


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_PROCESS_ADDRESSES": "a:8476,b:8476"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
    ],
)
def test_gke_says_in_the_environment_how_many_hosts_there_are(
    on_tpu_vm, variables, several
):
    for name, value in variables.items():
        on_tpu_vm.setenv(name, value)
    assert distributed._has_peers() == several


def test_a_process_can_be_kept_for_itself(on_tpu_vm):
    on_tpu_vm.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    on_tpu_vm.setenv("JAX_NUM_PROCESSES", "1")
    distributed.start_processes()
    assert not jax.distributed.is_initialized()


def test_devices_of_processes_that_have_not_joined_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    answer = recurjax("train", tiny_experiment.__file__, "--runs", tmp_path)
    assert_refused(answer, "the devices belong to 2 processes that are not connected")
    assert not list(tmp_path.iterdir())
