"""The unfinished work of `prepare`, from which a stopped run continues.

    .OUT.partial/lock              held by the process that writes
    .OUT.partial/tokens-*.arrayrecord
    .OUT.partial/documents-*.npy   int64 [2, n]: begins and bytes of further documents
    .OUT.partial/tail-*.bin        the tokens after the last full shard
    .OUT.partial/progress.json     all of the above up to one document; written last

`prepare` rewrites `progress.json` at the first end of a document after each full shard.
A continued run redoes whatever was written after that.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recurjax.data.prepared.directory import Shard
from recurjax.errors import UserError
from recurjax.files.arrays import Expected, read_array
from recurjax.files.atomic import force_to_disk, refuse_existing, write_atomic
from recurjax.files.json_files import read_json_object

_PROGRESS = "progress.json"
_LOCK = "lock"


@dataclass(frozen=True, kw_only=True)
class PartialState:
    """The state of an unfinished preparation.

    Attributes:
      documents: how many the following fields cover.
      starts, document_bytes: where each begins, and the bytes of its tokens.
      tokens, text_bytes, counted_bytes: totals of all of them.
      shards: the full files.
      tail: the tokens after the last of these, as they are stored.
    """

    documents: int = 0
    starts: Sequence[int] | np.ndarray = ()
    document_bytes: Sequence[int] | np.ndarray = ()
    tokens: int = 0
    text_bytes: int = 0
    counted_bytes: int = 0
    shards: tuple[Shard, ...] = ()
    tail: bytes = b""


class Partial:
    """The folder of a preparation that is not done."""

    def __init__(self, folder: Path, of: dict[str, Any]):
        """Reads what an earlier call left there.

        Args:
          folder: is there.
          of: what is prepared and how, plain JSON: only the same continues.

        Raises:
          UserError: it is another preparation, or damaged.
        """
        self.folder, self._of = folder, of
        self._pieces = 0
        # Without a progress file no shard is complete: start from the beginning.
        self.state = PartialState()
        if (folder / _PROGRESS).is_file():
            self.state = self._read()
        expected = {_LOCK, _PROGRESS, *(shard.file for shard in self.state.shards)}
        expected |= {_documents(n) for n in range(self._pieces)}
        expected |= {_tail(self._pieces)}
        for file in folder.iterdir():  # files that will be rewritten
            if file.name in expected:
                continue
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()

    def keep(self, state: PartialState) -> None:
        """Notes how far the preparation is; its shards are closed files."""
        known = len(self.state.shards)
        # Everything that the progress file names is on disk before the file itself, so
        # that a power cut leaves a valid file, old or new.
        for shard in state.shards[known:]:
            force_to_disk(self.folder / shard.file)
        # Only the documents since the last progress file: rewriting all of them for
        # each shard would make the cost quadratic in the number of shards.
        news = slice(self.state.documents, state.documents)
        piece = np.array([state.starts[news], state.document_bytes[news]], np.int64)
        with open(self.folder / _documents(self._pieces), "wb") as file:
            np.save(file, piece)
        self._pieces += 1
        (self.folder / _tail(self._pieces)).write_bytes(state.tail)
        for name in (_documents(self._pieces - 1), _tail(self._pieces)):
            force_to_disk(self.folder / name)
        progress = {
            "of": self._of,
            "documents": state.documents,
            "tokens": state.tokens,
            "text_bytes": state.text_bytes,
            "counted_bytes": state.counted_bytes,
            "shards": [asdict(shard) for shard in state.shards],
            "pieces": self._pieces,
        }
        write_atomic(self.folder / _PROGRESS, json.dumps(progress) + "\n")
        with suppress(FileNotFoundError):
            (self.folder / _tail(self._pieces - 1)).unlink()
        self.state = state

    @property
    def is_worth_keeping(self) -> bool:
        """Whether some of the work is on disk."""
        return (self.folder / _PROGRESS).is_file()

    def clean(self) -> None:
        """Removes what only a preparation that is not done needs."""
        names = [_PROGRESS, _tail(self._pieces)]
        for name in (*names, *(_documents(n) for n in range(self._pieces))):
            with suppress(FileNotFoundError):
                (self.folder / name).unlink()

    def _read(self) -> PartialState:
        file = self.folder / _PROGRESS
        again = f"remove {self.folder} to start again"
        progress = read_json_object(file, "what was prepared so far")
        before = progress.get("of")
        if before != self._of:
            differing = sorted(
                name
                for name in self._of
                if not isinstance(before, dict) or before.get(name) != self._of[name]
            )
            raise UserError(
                f"{self.folder} belongs to a preparation with other settings "
                f"({', '.join(differing) or 'all'}): give the same command again, "
                f"or {again}"
            )
        try:
            shards = tuple(Shard(**shard) for shard in progress["shards"])
            self._pieces = int(progress["pieces"])
            files = [self.folder / _documents(n) for n in range(self._pieces)]
            pieces = [
                read_array(file, Expected("i", (2, None)), str(file)) for file in files
            ]
            starts, sizes = np.concatenate(pieces, axis=1)
            state = PartialState(
                documents=progress["documents"],
                starts=starts,
                document_bytes=sizes,
                tokens=progress["tokens"],
                text_bytes=progress["text_bytes"],
                # 0: begun by a version that did not count them.
                counted_bytes=progress.get("counted_bytes", 0),
                shards=shards,
                tail=(self.folder / _tail(self._pieces)).read_bytes(),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{self.folder} is damaged ({error}): {again}") from error
        # By size alone: to read them all again would cost a good part of what is saved.
        for shard in shards:
            path = self.folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.size:
                raise UserError(f"{path} is damaged: {again}")
        if len(starts) != state.documents:
            raise UserError(f"{self.folder} is damaged: {again}")
        return state


@contextmanager
def partial_folder(out: Path, of: dict[str, Any]) -> Iterator[Partial]:
    """Gives the folder that takes the place `out` when the block ends well.

    On failure the complete shards stay for the next call; without any, the folder is
    removed.

    Raises:
      UserError: something is at `out`, another process prepares it at this moment, or
        what was begun there is another preparation.
      OSError: the disk does not take it.
    """
    refuse_existing(out)
    out = out.absolute()
    folder = out.with_name(f".{out.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / _LOCK, out):
        partial = Partial(folder, of)
        try:
            yield partial
        # An interrupt from the keyboard too: a folder stays only if it saves work.
        except BaseException:
            if not partial.is_worth_keeping:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        partial.clean()
        for file in folder.iterdir():
            if file.is_file():
                force_to_disk(file)
        # Rename last: a folder named `out` is complete, even after a power cut.
        force_to_disk(folder)
        (folder / _LOCK).unlink()
        os.rename(folder, out)
        force_to_disk(out.parent)


@contextmanager
def _locked(file: Path, out: Path) -> Iterator[None]:
    with file.open("w") as opened:
        try:
            # The system's own lock ends with the process, however that ends.
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is already preparing {out}: wait for it to finish"
            ) from None
        yield  # Closing the file ends the lock.


def _documents(number: int) -> str:
    return f"documents-{number:05d}.npy"


def _tail(number: int) -> str:
    return f"tail-{number:05d}.bin"
