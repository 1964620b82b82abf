"""One run directory, one run: who holds it, whether they live, and taking over.

Two processes that train in one directory would destroy each other's files: the second
rewinds metrics.jsonl under the first and removes its save in flight. So process 0 of a
run holds `ROOT/lock`, from before it reads anything there until it ends. The file says
who holds it (host, process, since when), and the holder touches it every few seconds.

A lock whose holder died is taken over: on the same machine the kernel says at once
whether that process lives; of another machine the file itself says it, by staying
untouched for `_SILENCE` seconds while this process watches. A holder that was only
asleep (a closed laptop, a suspended virtual machine) and whose lock was taken over
finds that out before it saves, and stops.

What it asks of a file system: that a link, or a file opened with O_EXCL, is made for
one of two who ask, and that other machines see a touch within `_SILENCE`. Local disks,
NFS from version 3 on, Lustre and GPFS do. A mount that caches attributes for longer,
or one of a bucket, does not: there nothing may start a run twice at the same moment.
Of a run in a bucket the lock is an object there (`LockObject`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from recurjax.errors import UserError
from recurjax.files.storage import Store
from recurjax.training.agreement import first_process
from recurjax.training.run.lock_places import LOCK, Holder, LockFile, LockObject

_BEAT, _SILENCE = 10.0, 90.0
"""Seconds between two touches, and without one before a holder counts as dead."""


class RunLock:
    """This process' hold of a run directory. See `held`, which makes and ends it."""

    def __init__(self, file: LockFile | LockObject, holder: Holder):
        """Begins to touch the lock, which is this process' already."""
        self._file, self._holder = file, holder
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def check(self) -> None:
        """Makes sure that the lock is still this process'.

        Raises:
          UserError: another process took it over, which runs now.
        """
        there = self._file.read()
        if there == self._holder:
            return
        if there is None and not self._file.exists():
            # Removed by hand, and nobody came since: it is still this run's.
            with suppress(FileNotFoundError):  # all of the directory is gone
                if self._file.create(self._holder):
                    return
            there = self._file.read()
        whom = "somebody else" if there is None else f"{there}"
        raise UserError(
            f"{self._file.root} was taken over by {whom} while this process "
            "did not answer (asleep?) or its lock was removed: this one stops and "
            "saves nothing more"
        )

    def release(self) -> None:
        """Removes the lock, if it is still this process'."""
        self._ended.set()
        self._beats.join()
        with suppress(OSError, UserError):
            if self._file.read() == self._holder:
                self._file.remove()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            # Whatever hinders it: the next save looks for itself.
            with suppress(OSError, UserError):
                if self._file.read() == self._holder:
                    self._file.touch()


@contextmanager
def held(root: Path, say: Callable[[str], None]) -> Iterator[RunLock]:
    """Holds the run directory `root` for the time of a block.

    The folder is made if need be, and removed again if nothing was put into it.

    Args:
      root: the run directory.
      say: gets a sentence when a dead process' lock is taken over, or waited for.

    Raises:
      UserError: another process holds it; the sentence names it.
    """
    # Folders made here are removed again, should nothing be put into them.
    made = _make(root)
    try:
        lock = _acquire(LockFile(root / LOCK), say)
        try:
            yield lock
        finally:
            lock.release()
    finally:
        for folder in made:
            with suppress(OSError):  # not empty: a run lies there now
                folder.rmdir()


@contextmanager
def held_in_store(store: Store, say: Callable[[str], None]) -> Iterator[RunLock]:
    """Holds the run directory of a store for the time of a block; see `held`."""
    lock = _acquire(LockObject(store), say)
    try:
        yield lock
    finally:
        lock.release()


def hold(root: Path, stack: ExitStack, console: Console) -> Callable[[], None]:
    """Has process 0 hold the run directory; returns the check that it still does.

    Every process calls both at the same point.
    """

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    locks: list[RunLock] = []
    first_process(lambda: locks.append(stack.enter_context(held(root, say))))
    return lambda: first_process(lambda: locks[0].check())


def _acquire(file: LockFile | LockObject, say: Callable[[str], None]) -> RunLock:
    root, own = file.root, Holder.of_this_process()
    while not _create(file, own):
        other = _holder(file)
        if other is None:  # released in this moment
            continue
        lives = other.lives()
        if lives is None:
            say(
                f"{root} is locked by {other}: watching for up to {_SILENCE:.0f} s "
                "whether that process still touches the lock"
            )
            lives = _is_touched(file, other)
        if lives:
            raise UserError(
                f"{root} is in use by {other}: wait for its end, stop it or choose "
                f"another --name (if no such process runs, remove {file})"
            )
        if not file.replace(other, own):
            raise UserError(
                f"{root} is taken over by another process at this moment: try again "
                f"(if nothing runs, remove {file} and {file}.*.successor)"
            )
        say(f"{root} was locked by {other}, which has ended without releasing it")
        break
    return RunLock(file, own)


def _create(file: LockFile | LockObject, own: Holder) -> bool:
    try:
        return file.create(own)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{file.root} cannot be written: {reason}") from error


def _holder(file: LockFile | LockObject) -> Holder | None:
    """Reads the holder; None: the lock is gone."""
    for _ in range(10):
        if not file.exists():
            return None
        if (holder := file.read()) is not None:
            return holder
        time.sleep(0.1)  # Without links a lock is empty for a moment.
    raise UserError(
        f"{file} does not say who holds the run directory: if no process trains "
        "there, remove it"
    )


def _is_touched(file: LockFile | LockObject, holder: Holder) -> bool:
    """Watches a lock until its holder touches it, for `_SILENCE` at most."""
    end = time.monotonic() + _SILENCE
    with suppress(FileNotFoundError):
        before = file.touched()
        while time.monotonic() < end:
            time.sleep(min(1.0, _BEAT))
            if file.touched() != before:
                return True
            if file.read() != holder:
                return True
    return False


def _make(root: Path) -> list[Path]:
    """Makes a folder and those above it; returns the new ones, the innermost first."""
    new = []
    for folder in (root, *root.parents):
        if folder.exists():
            break
        new.append(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{root} cannot be made: {reason}") from error
    return new
