"""Runs and data in buckets, through servers on loopback that speak as the stores do.

They need pip install '.[emulators]'; `tests/cli/test_buckets.py` needs nothing.
"""

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import fsspec
import pytest

from recurjax.files.storage import open_store
from tests.cli.commands import TINY, recurjax
from tests.cli.test_buckets import kill_at
from tests.killed_pair import train_in_pairs
from tests.training.run_contents import assert_same_run

pytestmark = pytest.mark.slow

EXTRAS = "'recurjax[cloud,s3,emulators]'"
NEEDS = {"gs": ("gcp_storage_emulator", "gcsfs"), "s3": ("moto", "s3fs")}
SERVERS = {
    "gs": "gcp_storage_emulator start --in-memory --default-bucket bucket --port",
    "s3": "moto.server -p",
}


@pytest.fixture(scope="module", params=NEEDS)
def served(request, tmp_path_factory):
    """A server with a bucket; its URL, and the environment that leads there."""
    for package in NEEDS[request.param]:
        # Not imported yet: gcsfs reads the environment when it is.
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {EXTRAS}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "FSSPEC_GS_TOKEN": "anon",
        # Requests for kinds of buckets that the server does not know use gRPC.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", *SERVERS[request.param].split(), str(port)]
    if request.param == "gs":
        command += ["--host", "127.0.0.1"]
    with log.open("w") as said, pytest.MonkeyPatch.context() as patch:
        # A warning of a server's own must not end it.
        env = {**os.environ, "PYTHONWARNINGS": "ignore"}
        server = subprocess.Popen(command, stdout=said, stderr=said, env=env)
        for name, value in place.items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        patch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
        try:
            limit = time.monotonic() + 30
            while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
                assert server.poll() is None and time.monotonic() < limit, (
                    log.read_text()
                )
                time.sleep(0.2)
            if request.param == "s3":
                fsspec.filesystem("s3").mkdir("bucket")
            yield f"{request.param}://bucket", place
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def runs(served, request):
    return f"{served[0]}/{request.node.originalname}"


def copy_of(url, folder):
    """Copies everything at a URL into a folder."""
    store = open_store(url)
    for name in store.sizes():
        store.fetch(name, folder / name)
    return folder


def kept(url):
    names = open_store(url).sizes()
    return {n.split("/")[1] for n in names if n.startswith("checkpoints")}


@pytest.mark.filterwarnings("ignore")  # of the stores' own packages
def test_five_kills_and_resumes_are_the_run_that_was_not_stopped(
    finished, runs, monkeypatch, tmp_path
):
    url = f"{runs}/tiny"
    for step in (2, 4, 5, 4, 3):  # counted from where each start resumes
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            assert recurjax("train", TINY, "--runs", runs)[0] != 0
    code, out, err = recurjax("train", TINY, "--runs", runs)
    assert (code, err) == (0, ""), err
    assert f"finished at step 12: {url}" in out and "resuming at step" in out
    assert_same_run(copy_of(url, tmp_path / "copy"), finished)
    assert len(kept(url)) == 3 and "12" in kept(url)
    assert "lock" not in open_store(url).sizes()

    code, out, _ = recurjax("evaluate", url, "--batch", "512")
    assert code == 0 and '"step": 12' in out and f'"run": "{url}"' in out

    # A damaged step is left out, made again, and set aside. The largest file may hold
    # bytes that nothing needs; the merged index is read by every restore.
    store = open_store(url, write=True)
    [at] = [n for n in store.sizes() if n.startswith("checkpoints/12/state/d/")]
    whole = store.read(at)
    store.write(at, whole[: len(whole) // 2])
    code, out, err = recurjax("train", TINY, "--runs", runs)
    assert (code, err) == (0, "") and "Checkpoint 12" in out, (out, err)
    assert "resuming at step 9 of 12" in out
    assert_same_run(copy_of(url, tmp_path / "again"), finished)
    assert "12.damaged" in kept(url)


@pytest.mark.filterwarnings("ignore")
def test_five_kills_of_one_of_two_processes_are_the_run_that_was_not_stopped(
    served, runs, quick_compilation, tmp_path
):
    env = quick_compilation | served[1]
    codes = train_in_pairs(tmp_path / "whole", tmp_path / "runs", [0], env)
    assert codes == {0: {0: 0, 1: 0}}
    # Counted from where each start resumes; processes 0 and 1 are killed in turns.
    said = tmp_path / "said"
    codes = train_in_pairs(said, runs, [2, 4, 5, 4, 3, 0], env)
    last = (said / "5.0").read_text()
    assert codes[5] == {0: 0, 1: 0}, last
    assert [codes[start][start % 2] for start in range(5)] == [-9] * 5, codes
    assert "resuming at step" in last and "finished at step 12" in last
    assert_same_run(copy_of(f"{runs}/tiny", tmp_path / "copy"), tmp_path / "runs/tiny")
    assert "lock" not in open_store(f"{runs}/tiny").sizes()


@pytest.mark.filterwarnings("ignore")
def test_data_is_prepared_there_and_trained_on(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("RECURJAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("To be, or not to be.\n" * 500)
    store = open_store(f"{runs}/texts", write=True)
    store.send(tmp_path / "a.txt", "a.txt")
    words = ["--corpus", f"{runs}/texts/*.txt", "--shard-tokens", "2048"]
    code, out, err = recurjax("data", "prepare", "--out", f"{runs}/shards", *words)
    assert code == 0 and f"{runs}/shards: 1 documents" in out, err
    assert recurjax("data", "verify", f"{runs}/shards")[0] == 0
    options = ["--corpus", f"{runs}/shards", "--training.steps", "3"]
    code, out, err = recurjax("train", TINY, "--runs", tmp_path, *options)
    assert code == 0 and "finished at step 3" in out, err
