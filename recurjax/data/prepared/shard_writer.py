"""Writes records of tokens to files of equal size."""

from pathlib import Path

from array_record.python.array_record_module import ArrayRecordWriter

from recurjax.data.prepared.directory import Shard
from recurjax.files.atomic import sha256_of

BLOCK = 1024
"""Tokens in a record."""


def records_of(shard_tokens: int) -> int:
    """Counts the records of a file that is full."""
    return -(-shard_tokens // BLOCK)


class ShardWriter:
    """Writes records to files of `per_shard` records each."""

    def __init__(self, folder: Path, per_shard: int, shards: tuple[Shard, ...] = ()):
        """Goes on after the shards that are there."""
        self._folder, self._per_shard = folder, per_shard
        self._shards = list(shards)
        self.records_of = 0
        self._writer: ArrayRecordWriter | None = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files that are full."""
        return tuple(self._shards)

    def write_whole_records(self, data: bytes, size: int) -> bytes:
        """Writes records of `size` bytes and returns what does not make one."""
        whole = len(data) - len(data) % size
        for begin in range(0, whole, size):
            self.write(data[begin : begin + size])
        return data[whole:]

    def write(self, record: bytes) -> None:
        if self.records_of == self._per_shard:
            self._close()
        # group_size 1: each record can be read alone, which random access needs.
        writer = self._writer or ArrayRecordWriter(str(self._path()), "group_size:1")
        self._writer = writer
        writer.write(record)
        self.records_of += 1

    def finish(self) -> tuple[Shard, ...]:
        self._close()
        return tuple(self._shards)

    def _path(self) -> Path:
        return self._folder / f"tokens-{len(self._shards):05d}.arrayrecord"

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        path = self._path()
        self._shards.append(
            Shard(
                file=path.name,
                # Read back from the disk: the checksum is of what is there, not of what
                # was meant.
                records=self.records_of,
                size=path.stat().st_size,
                sha256=sha256_of(path),
            )
        )
        self._writer, self.records_of = None, 0
