"""Runs two processes of one training, one of which meets a fault; a script of tests.

    faulty_pair.py FOLDER SCENARIO ...

Each scenario's processes write what they say to FOLDER/SCENARIO.RANK, and a line with
exit code and time of the end to FOLDER/ends. A fault notes its time in FOLDER/SCENARIO.
jax is imported once for all and forked before it has started anything.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from recurjax.cli.main import main
from recurjax.errors import UserError
from recurjax.training import loop
from recurjax.training import session as session_module
from recurjax.training.run import RunDirectory, shared_directory
from recurjax.training.session import Session
from tests.training import tiny_experiment

FAULTY = 1


def note(folder: Path, scenario: str) -> None:
    (folder / scenario).write_text(repr(time.time()))


def arm(scenario: str, rank: int, folder: Path) -> None:
    """Makes the fault of a scenario happen in this process."""

    def fail(error: BaseException):
        note(folder, scenario)
        raise error

    def at_step(number: int, act) -> None:
        steps, real = [], Session.next_batch

        def next_batch(session):
            steps.append(1)
            if len(steps) == number:
                act()
            return real(session)

        Session.next_batch = next_batch

    def die():
        note(folder, scenario)
        os.kill(os.getpid(), signal.SIGKILL)

    if scenario == f"killed_{rank}":
        at_step(5, die)
    elif rank == FAULTY and scenario == "data":
        at_step(5, lambda: fail(UserError("shard x is damaged: prepare it again")))
    elif rank == FAULTY and scenario == "tokenizer":
        error = UserError("no tokenizer at there")
        session_module.open_dataset = lambda *_, **__: fail(error)
    elif rank == FAULTY and scenario == "restore":
        Session.start = lambda *_: fail(OSError(5, "Input/output error", "9/state"))
    elif rank == FAULTY and scenario == "evaluation":
        session_module.score = lambda *_, **__: fail(RuntimeError("a bug\nof ours"))
    elif rank == 0 and scenario == "first":
        RunDirectory.rewind = lambda *_: fail(OSError(28, "No space left on device"))
    elif scenario == "apart":
        real_session = loop.Session

        def session(*args, **options):
            if rank == FAULTY:
                note(folder, scenario)
            return real_session(*args, **options)

        loop.Session = session
        shared_directory._WAIT_SECONDS = 2.0


def run(scenario: str, rank: int, port: int, folder: Path) -> int:
    out = os.open(folder / f"{scenario}.{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    os.environ |= {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
    arm(scenario, rank, folder)
    apart = f".{rank}" if scenario == "apart" else ""
    runs = folder / f"runs_{scenario}{apart}"
    file = str(tiny_experiment.__file__)
    return main(["train", file, "--runs", str(runs)])


def start(scenario: str, folder: Path) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                sys.exit(run(scenario, rank, port, folder))
            except SystemExit:
                raise
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.exit(1)
        children.append(child)
    return children


if __name__ == "__main__":
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    with (folder / "ends").open("w") as ends:
        for scenario in scenarios:
            running = start(scenario, folder)
            names = {child: rank for rank, child in enumerate(running)}
            while names:
                child, status = os.wait()
                code = os.waitstatus_to_exitcode(status)
                rank = names.pop(child)
                ends.write(f"{scenario} {rank} {code} {time.time()!r}\n")
                ends.flush()
