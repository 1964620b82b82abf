"""The lock of a run directory: who holds it, whether they live, and taking over.

Two processes in one directory would destroy each other's files: the second
rewinds metrics.jsonl under the first and removes its save in flight. So process 0 of a
run holds `ROOT/lock`, from before it reads anything there until it ends. The file says
who holds it (host, process, since when), and the holder touches it every few seconds.
A run in a bucket has its lock as an object there.

A lock whose holder died is taken over: on the same machine the kernel says at once
whether that process lives; of another machine the lock itself says it, by staying
untouched for `_SILENCE` seconds while this process watches. A holder that was only
asleep (a closed laptop, a suspended virtual machine) and whose lock was taken over
finds that out before it saves, and stops.

What a lock asks of a file system: that a link, or a file opened with O_EXCL, is made
for one of two who ask, and that other machines see a touch within `_SILENCE`. Local
disks, NFS from version 3 on, Lustre and GPFS do. A mount that caches attributes for
longer, or one of a bucket, does not: there nothing may start a run twice at the same
moment. Real stores make an object for one of two who ask; where a store does not know
that condition, the content that is read back decides.
"""

import errno
import json
import os
import re
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from recurjax.config_json import from_json
from recurjax.errors import UserError
from recurjax.files.atomic import make_folders
from recurjax.files.json_files import parse_json
from recurjax.files.storage import Store
from recurjax.training.agreement import first_process

LOCK = "lock"
_BEAT, _SILENCE = 10.0, 90.0
"""Seconds between two touches, and without one before a holder counts as dead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds a run directory.

    Attributes:
      host: name of the machine.
      pid: process id, as its machine or container counts them.
      since: when it took the lock, in its local time with the offset.
      machine: what tells this boot and these process numbers from any other's.
      born: when the process started, by its kernel's clock: a number given to
        another process later has another time. None where the system does not say.
      token: random token of this lock.
    """

    host: str
    pid: int
    since: str
    machine: str
    born: str | None
    token: str

    @classmethod
    def of_this_process(cls) -> "Holder":
        """Makes the holder that this process is, since now."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=_machine(),
            born=_born(os.getpid()),
            token=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def lives(self) -> bool | None:
        """Whether the process runs; None: unknown, on another machine."""
        if self.machine != _machine():
            return None
        try:
            # Signal 0 only checks whether the process exists.
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # it runs, and is another user's
        # Without times the number may belong to another process by now.
        return None if self.born is None else _born(self.pid) == self.born


_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Folder:
    """A folder of this machine, with the operations of a `Store` that a lock needs."""

    def __init__(self, path: Path):
        self._path = path
        self.url = str(path)

    def create(self, name: str, content: bytes) -> bool:
        file, aside = self._path / name, self._written(content)
        try:
            # Complete from its first moment, unlike a file that is opened and filled.
            os.link(aside, file)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                with file.open("xb") as opened:
                    opened.write(content)
            except FileExistsError:
                return False
        finally:
            aside.unlink()
        return True

    def read(self, name: str) -> bytes:
        file = self._path / name
        if file.exists() and not file.is_file():  # a pipe would wait for a writer
            raise ValueError(f"{file} is not a file")
        # Opened and not only looked at: NFS then asks the server again.
        return file.read_bytes()

    def write(self, name: str, content: bytes) -> None:
        os.replace(self._written(content), self._path / name)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._path / name).unlink()

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return os.lstat(self._path / name).st_size

    def touch(self, name: str) -> None:
        os.utime(self._path / name)

    def stamp(self, name: str) -> str:
        with (self._path / name).open("rb") as file:
            return str(os.fstat(file.fileno()).st_mtime_ns)

    def _written(self, content: bytes) -> Path:
        aside = self._path / f".{LOCK}.{secrets.token_hex(8)}.partial"
        with aside.open("xb") as file:
            file.write(content)
        return aside


class Lock:
    """The lock of a run directory: a file of its folder or an object of its store."""

    def __init__(self, place: Folder | Store):
        self._place = place

    @property
    def root(self) -> str:
        """The run directory, as messages name it."""
        return self._place.url

    def __str__(self) -> str:
        return f"{self.root}/{LOCK}"

    def create(self, holder: Holder) -> bool:
        """Makes the lock unless there is one; of several who try one succeeds."""
        return self._place.create(LOCK, _content(holder)) and self.read() == holder

    def replace(self, old: Holder, new: Holder) -> bool:
        """Makes the lock of `old` that of `new`; of several who try one succeeds."""
        # Only who makes this file may replace that lock: without it the slower of two
        # would remove not the dead process' lock but its successor's.
        right, mark = f"{LOCK}.{old.token}.successor", new.token.encode()
        if not self._place.create(right, mark):
            return False
        try:
            if self._place.read(right) != mark or self.read() != old:
                return False
            self._place.write(LOCK, _content(new))
            return True
        finally:
            self._place.remove([right])

    def read(self) -> Holder | None:
        """Reads who holds the lock; None: there is none, or it cannot be understood."""
        try:
            fields = parse_json(self._place.read(LOCK), LOCK)
            holder = from_json(Holder, fields, path=LOCK)
        except (FileNotFoundError, ValueError):  # a UserError is a ValueError
            return None
        # The token becomes a part of a file's name.
        return holder if re.fullmatch("[0-9a-f]{1,64}", holder.token) else None

    def exists(self) -> bool:
        """Returns whether anybody holds it."""
        return self._place.size(LOCK) is not None

    def touch(self) -> None:
        """Shows that the holder lives."""
        self._place.touch(LOCK)

    def stamp(self) -> str:
        """Returns what changes with every touch."""
        return self._place.stamp(LOCK)

    def remove(self) -> None:
        self._place.remove([LOCK])


def _content(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder)) + "\n").encode()


class RunLock:
    """This process' hold of a run directory. See `held`, which makes and ends it."""

    def __init__(self, lock: Lock, holder: Holder):
        """Starts touching the lock, which this process holds already."""
        self._lock, self._holder = lock, holder
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def check(self) -> None:
        """Makes sure that the lock is still this process'.

        Raises:
          UserError: another process took it over, which runs now.
        """
        there = self._lock.read()
        if there == self._holder:
            return
        if there is None and not self._lock.exists():
            # Removed by hand, and nobody came since: it is still this run's.
            with suppress(FileNotFoundError):  # all of the directory is gone
                if self._lock.create(self._holder):
                    return
            there = self._lock.read()
        whom = "somebody else" if there is None else f"{there}"
        raise UserError(
            f"{self._lock.root} was taken over by {whom}, because this process "
            "did not answer or its lock was removed: it stops here and saves "
            "nothing more"
        )

    def release(self) -> None:
        """Removes the lock, if it is still this process'."""
        self._ended.set()
        self._beats.join()
        with suppress(OSError, UserError):
            if self._lock.read() == self._holder:
                self._lock.remove()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            # Whatever hinders it: the next save looks for itself.
            with suppress(OSError, UserError):
                if self._lock.read() == self._holder:
                    self._lock.touch()


@contextmanager
def held(place: Path | Store, say: Callable[[str], None]) -> Iterator[RunLock]:
    """Holds a run directory for the time of a block.

    A folder is made if need be, and removed again if nothing was put into it.

    Args:
      place: the run directory, in a folder or a store.
      say: gets a sentence when a dead process' lock is taken over, or waited for.

    Raises:
      UserError: another process holds it; the sentence names it.
    """
    new = _make(place) if isinstance(place, Path) else []
    try:
        store = Folder(place) if isinstance(place, Path) else place
        lock = _acquire(Lock(store), say)
        try:
            yield lock
        finally:
            lock.release()
    finally:
        for folder in new:
            with suppress(OSError):  # not empty: a run is there now
                folder.rmdir()


def hold(root: Path, stack: ExitStack, console: Console) -> Callable[[], None]:
    """Has process 0 hold the run directory; returns the check that it still does.

    Every process calls both at the same point.
    """

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    locks: list[RunLock] = []
    first_process(lambda: locks.append(stack.enter_context(held(root, say))))
    return lambda: first_process(lambda: locks[0].check())


def _acquire(lock: Lock, say: Callable[[str], None]) -> RunLock:
    root, this = lock.root, Holder.of_this_process()
    while not _create(lock, this):
        other = _holder(lock)
        if other is None:  # released in this moment
            continue
        lives = other.lives()
        if lives is None:
            say(
                f"{root} is locked by {other}: watching for up to {_SILENCE:.0f} s "
                "whether that process still touches the lock"
            )
            lives = _is_touched(lock, other)
        if lives:
            raise UserError(
                f"{root} is in use by {other}: wait until it ends, stop it or choose "
                f"another --name (if no such process runs, remove {lock})"
            )
        if not lock.replace(other, this):
            raise UserError(
                f"{root} is being taken over by another process: try again "
                f"(if nothing runs, remove {lock} and {lock}.*.successor)"
            )
        say(f"{root} was locked by {other}, which has ended without releasing it")
        break
    return RunLock(lock, this)


def _create(lock: Lock, holder: Holder) -> bool:
    try:
        return lock.create(holder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{lock.root} cannot be written: {reason}") from error


def _holder(lock: Lock) -> Holder | None:
    """Reads the holder; None: the lock is gone."""
    for _ in range(10):
        if not lock.exists():
            return None
        if (holder := lock.read()) is not None:
            return holder
        time.sleep(0.1)  # without links a lock is empty for a moment
    raise UserError(
        f"{lock} does not say who holds the run directory: if no process trains "
        "there, remove it"
    )


def _is_touched(lock: Lock, holder: Holder) -> bool:
    """Watches a lock until its holder touches it, for `_SILENCE` at most."""
    end = time.monotonic() + _SILENCE
    try:
        before = lock.stamp()
        while time.monotonic() < end:
            time.sleep(1.0)
            if lock.stamp() != before or lock.read() != holder:
                return True
    except (FileNotFoundError, UserError):
        # It is gone, unless the store did not answer: then its holder may live.
        if lock.exists():
            raise
    return False


def _make(root: Path) -> list[Path]:
    try:
        return make_folders(root)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{root} cannot be created: {reason}") from error


def _machine() -> str:
    """Names this boot of this machine and this container's process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: the network card's address, where it has one
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _born(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may hold anything; then the state and, as the 22nd field
    # of all, the start time.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]  # Z, X: it has ended
