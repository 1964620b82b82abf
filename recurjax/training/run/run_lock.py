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

import errno
import json
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from recurjax.config_json import from_json
from recurjax.errors import UserError
from recurjax.storage import Store
from recurjax.training.agreement import first_process

LOCK = "lock"
_BEAT, _SILENCE = 10.0, 90.0
"""Seconds between two touches, and without one before a holder counts as dead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds a run directory.

    Attributes:
      host: name of the machine.
      pid: of the process, in its machine's (or container's) own numbers.
      since: when it took the lock, in its local time with the offset.
      machine: what tells this boot and these process numbers from any other's.
      born: when the process started, by its kernel's clock: a number given to
        another process later has another time. None where the system does not say.
      token: of this one lock.
    """

    host: str
    pid: int
    since: str
    machine: str
    born: str | None
    token: str

    @classmethod
    def of_this_process(cls) -> "Holder":
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
        """Whether the process runs; None: it cannot be asked from here."""
        if self.machine != _machine():
            return None
        try:
            # Signal 0 sends nothing: it only asks.
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # another user's, which runs
        # Without times the number may be another process' by now.
        return None if self.born is None else _born(self.pid) == self.born


class LockFile:
    """The lock as a file: all that is asked of where a run directory lies.

    A store without links or renames has the same methods in `LockObject`.
    """

    def __init__(self, path: Path):
        self.path = path

    @property
    def root(self) -> str:
        """The run directory, as messages name it."""
        return str(self.path.parent)

    def __str__(self) -> str:
        return str(self.path)

    def create(self, holder: Holder) -> bool:
        """Makes the lock unless there is one; of several who try one succeeds."""
        aside = self._written(holder)
        try:
            # Whole from its first moment, unlike a file that is opened and then filled.
            os.link(aside, self.path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._open_new(holder)
        finally:
            aside.unlink()
        return True

    def replace(self, old: Holder, new: Holder) -> bool:
        """Makes the lock of `old` that of `new`; of several who try one succeeds."""
        right = self.path.with_name(f"{LOCK}.{old.token}.successor")
        try:
            # Only who makes this file may replace that lock: without it the slower of
            # two would remove not the dead process' lock but its successor's.
            os.close(os.open(right, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return False
        try:
            if self.read() != old:
                return False
            os.replace(self._written(new), self.path)
            return True
        finally:
            right.unlink()

    def read(self) -> Holder | None:
        """Reads who holds the lock; None: there is none, or it cannot be understood."""
        try:
            # Opened and not only looked at: NFS then asks the server anew.
            fields = json.loads(self.path.read_bytes())
            return from_json(Holder, fields, path=LOCK)
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def touch(self) -> None:
        """Shows that the holder lives."""
        os.utime(self.path)

    def touched(self) -> int:
        """Returns a number that changes with every touch."""
        with self.path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def remove(self) -> None:
        self.path.unlink()

    def _written(self, holder: Holder) -> Path:
        aside = self.path.with_name(f".{LOCK}.{secrets.token_hex(8)}.partial")
        with aside.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(holder)) + "\n")
        return aside

    def _open_new(self, holder: Holder) -> bool:
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(holder)) + "\n")
        except FileExistsError:
            return False
        return True


class LockObject:
    """The lock as an object of a store.

    Real stores make an object for one of two who ask; where one does not know that
    condition, the content that is read back decides. A touch writes the object anew
    with a higher number, which the others watch.
    """

    def __init__(self, store: Store, name: str = LOCK):
        self._store, self._name, self._beats = store, name, 0

    @property
    def root(self) -> str:
        return self._store.url

    def __str__(self) -> str:
        return f"{self._store.url}/{self._name}"

    def create(self, holder: Holder) -> bool:
        if not self._store.create(self._name, self._content(holder)):
            return False
        return self.read() == holder

    def replace(self, old: Holder, new: Holder) -> bool:
        right = f"{self._name}.{old.token}.successor"
        if not self._store.create(right, new.token.encode()):
            return False
        try:
            if self._store.read(right) != new.token.encode() or self.read() != old:
                return False
            self._store.write(self._name, self._content(new))
            return True
        finally:
            self._store.remove([right])

    def read(self) -> Holder | None:
        found = self._read()
        return None if found is None else found[0]

    def exists(self) -> bool:
        return self._store.size(self._name) is not None

    def touch(self) -> None:
        found = self._read()
        if found is not None:
            self._beats += 1
            self._store.write(self._name, self._content(found[0]))

    def touched(self) -> int:
        found = self._read()
        if found is None:
            raise FileNotFoundError(str(self))
        return found[1]

    def remove(self) -> None:
        self._store.remove([self._name])

    def _content(self, holder: Holder) -> bytes:
        return json.dumps({"holder": asdict(holder), "beats": self._beats}).encode()

    def _read(self) -> tuple[Holder, int] | None:
        if not self.exists():
            return None
        try:
            fields = json.loads(self._store.read(self._name))
            return from_json(Holder, fields["holder"], path=LOCK), int(fields["beats"])
        except (ValueError, TypeError, KeyError, RecursionError):
            # UserError is a ValueError: removed between the two requests.
            return None


_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


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
