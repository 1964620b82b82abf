"""Two processes of one training on this machine: where they meet, and forked pairs."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.source_tree import ROOT


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(devices: int) -> dict[str, str]:
    """Returns each process' variables apart from its number: `devices` of its own."""
    return {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
    }


def places() -> list[dict[str, str]]:
    """Returns what tells either process of the other, in the order of their ranks."""
    meet = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    return [meet | {"JAX_PROCESS_ID": str(rank)} for rank in range(2)]


class End(NamedTuple):
    """How one process of a forked pair ended; at: seconds of the clock."""

    name: str
    rank: int
    code: int
    at: float


def run_script(
    module: str, folder: Path, *words: object, env: Mapping[str, str]
) -> list[End]:
    """Runs a script that ends in `fork_pairs`; returns how its processes ended."""
    command = [sys.executable, "-m", module, str(folder), *map(str, words)]
    # It is forked before jax has started a thread, which jax cannot know.
    quiet = {"PYTHONWARNINGS": "ignore"}
    every = {**env, **environment(1), **quiet}
    subprocess.run(command, check=True, timeout=500, env=every)
    lines = [line.split() for line in (folder / "ends").read_text().splitlines()]
    return [End(name, int(r), int(code), float(at)) for name, r, code, at in lines]


def fork_pairs(
    folder: Path, names: Sequence[str], run: Callable[[str, int], int]
) -> None:
    """Runs `run(name, rank)` in two forks for each name, one name after the other.

    What they say goes to folder/NAME.RANK, how each ended to a line of folder/ends. jax
    is imported once for all, by the script, and must not have started anything.
    """
    with (folder / "ends").open("w") as ends:
        for name in names:
            ranks = {
                _fork(folder, name, rank, place, run): rank
                for rank, place in enumerate(places())
            }
            while ranks:
                child, status = os.wait()
                code = os.waitstatus_to_exitcode(status)
                ends.write(f"{name} {ranks.pop(child)} {code} {time.time()!r}\n")
                ends.flush()


def _fork(folder: Path, name: str, rank: int, place: Mapping[str, str], run) -> int:
    child = os.fork()
    if child:
        return child
    try:
        out = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= place
        sys.exit(run(name, rank))
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
