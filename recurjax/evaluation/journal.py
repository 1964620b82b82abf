"""Writes answers to disk as they come, so that a killed evaluation continues."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import parse_json
from recurjax.training.agreement import first_process


class Journal:
    """JSON values by request, one per line, written as they come.

    Every process of a run knows the same entries, so that all ask the model the same;
    process 0 alone writes. A line that a kill cut off or a disk damaged is dropped.
    """

    def __init__(self, file: Path | None):
        """Reads what an earlier call left.

        Args:
          file: None keeps everything in memory.
        """
        self._file = file
        self._known: dict[str, Any] = dict(first_process(self._read))

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, request: str) -> bool:
        return request in self._known

    def __getitem__(self, request: str) -> Any:
        return self._known[request]

    def add(self, answers: Iterable[tuple[str, Any]]) -> None:
        """Stores answers under the `key_of` their requests."""
        new = dict(answers)
        self._known |= new
        if self._file is None or jax.process_index() > 0 or not new:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Appended and closed after each batch: a kill loses at most the batch in work.
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([key, new[key]]) + "\n" for key in new)

    def close(self) -> None:
        """Removes the file after the last answer."""
        if self._file is None or jax.process_index() > 0:
            return
        self._file.unlink(missing_ok=True)
        # A folder made for the journal alone goes with it.
        if self._file.parent.is_dir() and not any(self._file.parent.iterdir()):
            self._file.parent.rmdir()

    def _read(self) -> list[tuple[str, Any]]:
        if self._file is None or not self._file.is_file():
            # The last line is complete if the text ends with a line break.
            return []
        complete, _, cut = self._file.read_bytes().rpartition(b"\n")
        if cut:  # else the next line would be written after the half of another
            write_atomic(self._file, complete + b"\n" if complete else b"")
        return list(_entries(complete))


def key_of(*request: Any) -> str:
    """Returns a short key of a request; the parts are JSON values."""
    return hashlib.blake2b(json.dumps(request).encode(), digest_size=16).hexdigest()


def _entries(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yields the entries; requests of damaged lines run again."""
    for line in data.split(b"\n"):
        with suppress(UserError):
            match parse_json(line, "an answer"):
                case [str(key), value]:
                    yield key, value
