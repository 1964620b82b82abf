"""Trains with two processes until one is killed, again and again; a script of tests.

    killed_pair.py FOLDER RUNS STEP ...

Each STEP starts two processes on the tiny run in RUNS, with parameters cut over both;
the process whose turn it is kills itself when it reads that batch of its own, and none
does for a STEP of 0. What they say goes to FOLDER/START.RANK, a line with start, rank
and exit code to FOLDER/ends. `memory://` is a folder of FOLDER's, which two processes
can see. jax is imported once for all and forked before it has started anything.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from recurjax.cli.main import main
from recurjax.training.session import Session
from tests.source_tree import ROOT
from tests.training import tiny_experiment

ENV = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
    # It is forked before jax has started a thread, which jax cannot know.
    "PYTHONWARNINGS": "ignore",
}
OPTIONS = ["--mesh.fsdp", "2", "--training.keep-checkpoints", "2"]


def train_in_pairs(
    folder: Path, runs: Path | str, batches: Sequence[int], env: Mapping[str, str]
) -> dict[int, dict[int, int]]:
    """Runs this script; returns the exit codes of each start by rank."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.killed_pair", str(folder), str(runs)]
    command += map(str, batches)
    subprocess.run(command, check=True, timeout=500, env={**env, **ENV})
    codes: dict[int, dict[int, int]] = {}
    for line in (folder / "ends").read_text().splitlines():
        start, rank, code = map(int, line.split())
        codes.setdefault(start, {})[rank] = code
    return codes


def die_at(batch: int) -> None:
    read, real = [], Session.next_batch

    def next_batch(session):
        read.append(1)
        if len(read) == batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(session)

    Session.next_batch = next_batch


def memory_on_disk(folder: Path) -> None:
    class OnDisk(LocalFileSystem):
        protocol = "memory"

        def __init__(self, **options):
            super().__init__(auto_mkdir=True, **options)

        @classmethod
        def _strip_protocol(cls, path):
            inner = str(path).removeprefix("memory://").rstrip("/")
            return inner if inner.startswith("/") else f"{folder}/{inner}"

    fsspec.register_implementation("memory", OnDisk, clobber=True)


def run(start: int, rank: int, port: int, folder: Path, runs: str, batch: int) -> int:
    out = os.open(folder / f"{start}.{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    os.environ |= {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
    memory_on_disk(folder / "memory")
    if batch and rank == start % 2:
        die_at(batch)
    file = str(tiny_experiment.__file__)
    return main(["train", file, "--runs", runs, *OPTIONS])


def pair(start: int, folder: Path, runs: str, batch: int) -> dict[int, int]:
    """Runs two processes to their ends; returns their ranks by process number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {}
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                sys.exit(run(start, rank, port, folder, runs, batch))
            except SystemExit:
                raise
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.exit(1)
        ranks[child] = rank
    return ranks


if __name__ == "__main__":
    folder, runs, batches = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with (folder / "ends").open("w") as ends:
        for start, batch in enumerate(batches):
            ranks = pair(start, folder, runs, int(batch))
            while ranks:
                child, status = os.wait()
                code = os.waitstatus_to_exitcode(status)
                ends.write(f"{start} {ranks.pop(child)} {code}\n")
                ends.flush()
