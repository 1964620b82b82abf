"""Whether all processes of a run see the same run directory."""

import json
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

import jax

from recurjax.files.whole import write_whole
from recurjax.machine.peers import SharedError
from recurjax.training.agreement import every_process, first_process

_WAIT_SECONDS = 10.0
"""A network file system may show a new file to other machines some seconds later."""


def check_shared(root: Path) -> None:
    """Refuses a run directory that every machine has for itself.

    Process 0 writes a word that nobody can know into the directory and all must read
    it. Without this a run on several machines would train to its end, each writing its
    own part of every checkpoint to its own disk, and none could be restored.

    Raises:
      SharedError: some processes do not see what process 0 wrote; in all of them.
      OSError: process 0 cannot write there.
    """
    if jax.process_count() == 1:
        return
    made: list[Path] = []
    file = root / ".seen-by-all"

    def write() -> str:
        made.extend(_make(root))
        word = secrets.token_hex(16)
        write_whole(file, word)
        return word

    def remove() -> None:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: somebody else has begun to use it
            for folder in made:  # what is refused later leaves nothing behind
                folder.rmdir()

    word = first_process(write)
    # Every process looks for itself and tells all: a shared answer, the same for each.
    seen = [json.loads(text) for text in every_process(_look(file, word))]
    first_process(remove)
    blind = [number for number, (saw, _) in enumerate(seen) if not saw]
    if blind:
        rest = f" (and {len(blind) - 1} more)" if len(blind) > 1 else ""
        raise SharedError(
            f"process {blind[0]} on {seen[blind[0]][1]}{rest} does not see what "
            f"process 0 on {seen[0][1]} wrote to {root}: all processes of a run must "
            "share the run directory, so name a shared file system with --runs"
        )


def _look(file: Path, word: str) -> str:
    limit = time.monotonic() + _WAIT_SECONDS
    saw = False
    while not saw and time.monotonic() < limit:
        try:
            saw = file.read_text(encoding="utf-8") == word
        except OSError:
            saw = False
        if not saw:
            time.sleep(0.2)
    return json.dumps([saw, socket.gethostname()])


def _make(root: Path) -> list[Path]:
    """Makes a folder and returns those that were not there, the innermost first."""
    missing = [f for f in (root, *root.parents) if not f.exists()]
    root.mkdir(parents=True, exist_ok=True)
    return missing
