"""Runs two processes of one training, one of which meets a fault; a script of tests.

    faulty_pair.py FOLDER SCENARIO ...

What they say and how they end is where `pairs.fork_pairs` leaves it; a fault notes its
time in FOLDER/SCENARIO.
"""

import os
import signal
import sys
import time
from pathlib import Path

from recurjax.cli.main import main
from recurjax.errors import UserError
from recurjax.training import loop
from recurjax.training import session as session_module
from recurjax.training.run import RunDirectory, run_directory
from recurjax.training.session import Session
from tests.pairs import fork_pairs
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
        run_directory._WAIT_SECONDS = 2.0


def run(scenario: str, rank: int, folder: Path) -> int:
    arm(scenario, rank, folder)
    apart = f".{rank}" if scenario == "apart" else ""
    runs = folder / f"runs_{scenario}{apart}"
    return main(["train", str(tiny_experiment.__file__), "--runs", str(runs)])


if __name__ == "__main__":
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    fork_pairs(folder, scenarios, lambda scenario, rank: run(scenario, rank, folder))
