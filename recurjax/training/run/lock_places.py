"""The lock of a run: who holds it, and the file or object that says so."""

import errno
import json
import os
import secrets
import socket
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from recurjax.config_json import from_json
from recurjax.files.storage import Store

LOCK = "lock"


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
