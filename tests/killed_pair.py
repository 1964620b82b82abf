"""Trains with two processes until one is killed, again and again; a script of tests.

    killed_pair.py FOLDER RUNS STEP ...

Each STEP starts two processes on the tiny run in RUNS, with parameters cut over both;
the process whose turn it is kills itself when it reads that batch of its own, and none
does for a STEP of 0. What they say and how they end is where `pairs.fork_pairs` leaves
it. `memory://` is a folder of FOLDER's, which two processes can see.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from recurjax.cli.main import main
from recurjax.training.session import Session
from tests.pairs import fork_pairs, run_script
from tests.training import tiny_experiment

OPTIONS = ["--mesh.fsdp", "2", "--training.keep-checkpoints", "2"]


def train_in_pairs(
    folder: Path, runs: Path | str, batches: Sequence[int], env: Mapping[str, str]
) -> dict[int, dict[int, int]]:
    """Runs this script; returns the exit codes of each start by rank."""
    folder.mkdir()
    codes: dict[int, dict[int, int]] = {}
    for end in run_script("tests.killed_pair", folder, runs, *batches, env=env):
        codes.setdefault(int(end.name), {})[end.rank] = end.code
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


def run(start: int, rank: int, folder: Path, runs: str, batch: int) -> int:
    memory_on_disk(folder / "memory")
    if batch and rank == start % 2:
        die_at(batch)
    file = str(tiny_experiment.__file__)
    return main(["train", file, "--runs", runs, *OPTIONS])


if __name__ == "__main__":
    folder, runs, batches = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    fork_pairs(
        folder,
        [str(start) for start in range(len(batches))],
        lambda start, rank: run(
            int(start), rank, folder, runs, int(batches[int(start)])
        ),
    )
