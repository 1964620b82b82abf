"""The finished run of the tiny experiment, trained once for all tests that need one."""

import fcntl
from pathlib import Path

from tests.cli.commands import TINY, recurjax
from tests.training.compilation import shared_by_workers


def finished_tiny_run(tmp_path_factory) -> Path:
    """Returns a run with checkpoints of its steps 6, 9 and 12: to read or to copy.

    Whoever comes first trains it, of all processes that run tests. It is meant to be
    called under `quick_compilation`.
    """
    folder = shared_by_workers(tmp_path_factory) / "tiny_run"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file gives it back
        if not (folder / "trained").exists():
            code, out, err = recurjax("train", TINY, "--runs", folder)
            assert (code, err) == (0, ""), (out, err)
            assert out.endswith(f"finished at step 12: {folder}/tiny\n")
            (folder / "trained").touch()
    return folder / "tiny"
