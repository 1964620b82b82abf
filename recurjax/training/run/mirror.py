"""A run directory in a bucket, with a local working copy.

A bucket cannot append to metrics.jsonl, rename a checkpoint or link a lock. So a run
works in a folder of its own, which begins as a copy of the bucket's and is sent there
at each save and at the end: first metrics and the other small files, then a
checkpoint's arrays, and its commit file last. A step without one is incomplete: it is
left out when the run is fetched again, and removed when the next run begins. What was
set aside (`3.damaged`) is neither fetched nor removed.

Each process of a run has such a folder. Process 0 sends what is the run's, the others
their parts of a checkpoint's arrays; the commit file goes once all have sent theirs.

An object `lock` names the process that works on the run.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath

import jax

from recurjax.errors import UserError
from recurjax.files.storage import Store, open_store
from recurjax.machine import process_group
from recurjax.training.agreement import first_process
from recurjax.training.checkpoint.step_directory import ARRAYS, PART, is_set_aside
from recurjax.training.run.run_lock import LOCK, held

_CHECKPOINTS = "checkpoints"
_COMMIT = "commit_success.txt"
_CONFIG, _PROFILE = "config.json", "profile"
_MINUTES = 60
"""So long the processes wait for each other to send a checkpoint."""
NO_STEP = -1
"""Asks `fetched` for a run without its checkpoints."""
_PASSING = (".partial", ".removing", ".orbax-checkpoint-tmp")
"""Parts of names of what is being written or removed at this moment."""


class Mirror:
    """One run: a folder here, the same folder in a store.

    Attributes:
      parts: how many processes send their parts of each checkpoint.
    """

    def __init__(self, store: Store, folder: Path, *, part: int = 0, parts: int = 1):
        self.store, self.folder = store, folder
        self.parts, self._part = parts, part
        self.sent_bytes = self.sent_objects = self.pushes = 0
        self.check_lock: Callable[[], None] = lambda: None
        self._stamps: dict[str, tuple[int, int]] = {}
        self._unread: dict[int, list[str]] = {}
        self._whole: set[str] = set()
        self._pushing = threading.Lock()

    def steps(self) -> list[int]:
        """Lists the complete checkpoints of the store, oldest first."""
        return _complete(self.store.sizes())

    def fetch(
        self,
        *,
        steps: list[int] | None = None,
        names: dict[str, int] | None = None,
        arrays: bool = True,
    ) -> None:
        """Copies the store's files into the folder.

        Args:
          steps: copy these complete checkpoints only; None: all.
          names: what the store holds, where it was listed before.
          arrays: whether with the checkpoints' arrays; without them `fetch_arrays`
            gets those of one.
        """
        names = self.store.sizes() if names is None else names
        # Half a checkpoint is never fetched: it has no commit file.
        folders = {str(n) for n in (_complete(names) if steps is None else steps)}
        for name in names:
            head, *rest = PurePosixPath(name).parts
            if _is_set_aside(name):
                # An empty folder takes the name: the next step to be set aside gets
                # another one, and the two do not mix in the store.
                (self.folder / head / rest[0]).mkdir(parents=True, exist_ok=True)
            if head == _CHECKPOINTS and (rest[0] not in folders):
                continue
            # The lock is this process' own, and hidden files are being written.
            if _is_lock(name) or name.startswith("."):
                continue
            step = _step(name)
            if step is not None and rest[1] == ARRAYS and not arrays:
                self._unread.setdefault(step, []).append(name)
                continue
            self._fetch(name)

    def fetch_arrays(self, step: int) -> None:
        """Copies the arrays of a checkpoint that was fetched without them."""
        for name in self._unread.pop(step, []):
            self._fetch(name)

    def push(self, *, after_save: bool = True) -> None:
        """Makes the store's folder as this one is now.

        Args:
          after_save: a checkpoint was saved: all processes call this at once and wait
            for each other's parts. Otherwise only process 0 may call it, and a
            checkpoint that is incomplete by then stays incomplete.

        Raises:
          UserError: the store does not take it, another process has taken the run over,
            or another process of this run did not send its part.
        """
        with self._pushing:
            self.check_lock()
            self.pushes += 1
            # Names are looked up once; what appears meanwhile comes with the next push.
            local = [name for name in self._names() if self._is_own(name)]
            commits = [name for name in local if _is_commit(name)]
            self._send(name for name in local if not _is_commit(name))
            if after_save and self.parts > 1:
                self._meet()
                self._whole.update(commits)
            # Commit files are process 0's, and so is removing: nobody sends meanwhile.
            if self._part == 0:
                mixed = self.parts > 1
                self._send(
                    name
                    for name in commits
                    if not mixed or name in self._whole or name in self._stamps
                )
                self._remove_others(set(local))

    def _fetch(self, name: str) -> None:
        file = self.folder / name
        self.store.fetch(name, file)
        self._stamps[name] = _stamp(file)

    def _send(self, names: Iterable[str]) -> None:
        """Sends files, each only if it changed since it was last sent or fetched."""
        for name in sorted(names, key=_order):
            file = self.folder / name
            try:
                stamp = _stamp(file)
                if self._stamps.get(name) == stamp:
                    continue
                self.store.send(file, name)
            except FileNotFoundError:  # pruned or renamed meanwhile
                continue
            self._stamps[name] = stamp
            self.sent_bytes += stamp[0]
            self.sent_objects += 1

    def _meet(self) -> None:
        try:
            process_group.barrier(seconds=60 * _MINUTES)
        except TimeoutError as error:
            raise UserError(
                f"{self.store.url}: another process has not sent its part of a "
                f"checkpoint within {_MINUTES} minutes: restart all processes, and "
                "the run resumes from its last complete checkpoint"
            ) from error

    def _remove_others(self, local: set[str]) -> None:
        """Removes from the store what is gone here, or was never of this run."""
        there = {name for name in self.store.sizes() if not _is_lock(name)}
        steps = {_step(name) for name in local}
        gone = [n for n in there - local if not self._is_elsewhere(n, steps)]
        for name in gone:
            self._stamps.pop(name, None)
        # The commit file first: half a step must not look complete.
        self.store.remove(sorted(gone, key=_order, reverse=True))

    def _is_own(self, name: str) -> bool:
        """Whether this process sends a file: its part, its profile; process 0 all."""
        path = PurePosixPath(name).parts
        part = (ARRAYS, f"{PART}{self._part}")
        return self._part == 0 or path[0] == _PROFILE or path[2:4] == part

    def _is_elsewhere(self, name: str, steps: set[int | None]) -> bool:
        """Whether a file of the store stays though it is not in this folder.

        Args:
          name: name of the file.
          steps: the checkpoints in this folder.
        """
        path, step = PurePosixPath(name).parts, _step(name)
        if _is_set_aside(name):
            return True
        if path[0] == _PROFILE:
            return self.parts > 1
        if step is None or step not in steps or path[2] != ARRAYS:
            return False
        parts = {f"{PART}{number}" for number in range(1, self.parts)}
        return step in self._unread or path[3] in parts

    def sentence(self) -> str:
        """Reports the bytes sent and requests made so far, which a bucket bills."""
        return (
            f"sent {self.sent_bytes:,} bytes in {self.sent_objects:,} objects, at "
            f"{self.pushes - 1:,} saves and the end, with "
            f"{self.store.requests.total:,} requests of all kinds"
        )

    def _names(self) -> list[str]:
        names = []
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if not _is_passing(name)]
            at = Path(folder)
            # A step that orbax has not finished has no commit file yet.
            is_step = at.parent == self.folder / _CHECKPOINTS and at.name.isdecimal()
            if is_step and not (at / _COMMIT).exists():
                folders.clear()
                continue
            for name in files:
                if not _is_passing(name) and (at != self.folder or name != LOCK):
                    names.append((at / name).relative_to(self.folder).as_posix())
        return names


@contextmanager
def mirrored(url: str) -> Iterator[Mirror]:
    """Works on a run of a bucket for the time of a block, and sends it at its end.

    Raises:
      UserError: the bucket cannot be read and written, or another process works on the
        run; before the block begins.
    """
    store = open_store(url, write=True)
    with ExitStack() as stack:
        temporary = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="recurjax-run-")
        )
        # The folder has the run's own name, which messages show.
        mirror = Mirror(
            store,
            Path(temporary) / PurePosixPath(url).name,
            part=jax.process_index(),
            parts=jax.process_count(),
        )
        mirror.folder.mkdir()

        def begin() -> dict[str, int]:
            store.check_writable()
            lock = stack.enter_context(held(store, print))
            mirror.check_lock = lock.check
            # Another process' end may end this one: the next start need not wait.
            stack.enter_context(process_group.on_abort(lock.release))
            names = store.sizes()
            # Before another step of that number is sent: its parts would mix.
            halves = _incomplete(names)
            store.remove(halves)
            return {name: names[name] for name in names.keys() - {*halves}}

        # One list for all: what each listed for itself could differ.
        mirror.fetch(names=first_process(begin), arrays=False)
        try:
            yield mirror
        # Also after an error: what was trained is in the bucket.
        finally:
            if jax.process_index() == 0:
                mirror.push(after_save=False)


class RunCopy:
    """A bucket's run on this disk, for reading, with few of its checkpoints.

    Attributes:
      folder: the copy's run directory.
    """

    def __init__(self, mirror: Mirror, names: dict[str, int], older: list[int]):
        self.folder = mirror.folder
        self._mirror, self._names, self._older = mirror, names, older

    def fetch_older(self) -> bool:
        """Fetches the newest checkpoint that is missing here; False: none is."""
        if not self._older:
            return False
        step = self._older.pop()
        within = f"{_CHECKPOINTS}/{step}/"
        names = {n: size for n, size in self._names.items() if n.startswith(within)}
        self._mirror.fetch(names=names, steps=[step])
        return True


@contextmanager
def fetched(url: str, *, step: int | None = None) -> Iterator[RunCopy]:
    """Gives a copy of a bucket's run for reading, with one checkpoint.

    Args:
      url: URL of the run directory.
      step: step of the checkpoint; None: the newest; `NO_STEP`: no checkpoint.

    Raises:
      UserError: there is no run directory, or no complete checkpoint of the step.
    """
    store = open_store(url)
    names = store.sizes()
    if _CONFIG not in names:
        raise UserError(f"{url} is not a run directory: no {_CONFIG}")
    steps = _complete(names)
    if step is not None and step not in (*steps, NO_STEP):
        # Raise it here: the copy would report no checkpoint at all.
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{url} has no checkpoint {step}; it has {there}")
    matching = [s for s in steps if s == step] if step is not None else steps[-1:]
    with tempfile.TemporaryDirectory(prefix="recurjax-run-") as folder:
        mirror = Mirror(store, Path(folder) / PurePosixPath(url).name)
        mirror.folder.mkdir()
        mirror.fetch(names=names, steps=matching)
        # A checkpoint is large: an older one comes only where the newest is damaged.
        yield RunCopy(mirror, names, steps[:-1] if step is None else [])


def _complete(names: Iterable[str]) -> list[int]:
    steps = [_step(name) for name in names if _is_commit(name)]
    return sorted(step for step in steps if step is not None)


def _incomplete(names: dict[str, int]) -> list[str]:
    """Lists the objects of checkpoints without a commit file."""
    complete = _complete(names)
    return [n for n in names if (step := _step(n)) is not None and step not in complete]


def _step(name: str) -> int | None:
    """Returns the step of whose checkpoint a file is; None: of none."""
    head, *rest = PurePosixPath(name).parts
    is_step = head == _CHECKPOINTS and len(rest) > 1 and rest[0].isdecimal()
    return int(rest[0]) if is_step else None


def _is_set_aside(name: str) -> bool:
    """Whether a file is of a checkpoint set aside, which is never removed."""
    head, *rest = PurePosixPath(name).parts
    return head == _CHECKPOINTS and len(rest) > 1 and is_set_aside(rest[0])


def _is_commit(name: str) -> bool:
    return _step(name) is not None and PurePosixPath(name).parts[2:] == (_COMMIT,)


def _order(name: str) -> tuple[bool, bool, bool, str]:
    """Sorts names so that each one comes after everything that it marks as complete."""
    path = PurePosixPath(name)
    is_checkpoint = path.parts[0] == _CHECKPOINTS
    # Last of all the commit file of a checkpoint; before it config.json, then the rest.
    return is_checkpoint and path.name == _COMMIT, is_checkpoint, name == _CONFIG, name


def _is_lock(name: str) -> bool:
    return name == LOCK or name.startswith(f"{LOCK}.")


def _is_passing(name: str) -> bool:
    return any(part in name for part in _PASSING)


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
