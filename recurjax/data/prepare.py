"""Tokenizes a corpus once, into a directory that any number of runs read."""

import errno
import hashlib
import io
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from recurjax.data.config import Corpus
from recurjax.data.corpora import Reading, read_corpus
from recurjax.data.encoding import EncodedDocument, closing, encoded_documents
from recurjax.data.prepared import (
    FORMAT,
    INDEX,
    MANIFEST,
    TOKENIZER,
    Manifest,
    PreparedStream,
    Shard,
    sha256_of,
)
from recurjax.data.streams import token_dtype, validation_start
from recurjax.data.tokenizers import Tokenizer
from recurjax.data.workers import encode_in_processes
from recurjax.errors import UserError
from recurjax.files import new_folder
from recurjax.version import VERSION

BLOCK = 1024
"""Tokens in a record."""


class Progress(NamedTuple):
    """How far `prepare` has come; `done` of `total` is the share of the corpus."""

    done: int
    total: int
    documents: int
    tokens: int


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    validation_fraction: float = 0.1,
    shard_tokens: int = 1 << 26,
    ends: bool | None = None,
    max_tokens: int | None = None,
    workers: int = 1,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Writes a prepared directory: see `recurjax.data.prepared` for what is in it.

    The directory appears whole or not at all.

    Args:
      corpus: what to tokenize, in this order.
      tokenizer: is saved along with the tokens.
      out: the new directory; an empty one may be there.
      validation_fraction: the last share of the corpus' bytes, kept for validation.
      shard_tokens: tokens in a file, rounded up to whole records.
      ends: whether EOS comes after each document: see `encoded_documents`.
      max_tokens: no document is begun after so many tokens; None: all are taken.
      workers: processes that tokenize; what is written does not depend on it.
      progress: is called after each document.

    Raises:
      UserError: `out` is taken, the corpus cannot be read, the disk is full.
    """
    if not 0.0 <= validation_fraction <= 1.0:
        raise UserError(
            f"validation_fraction must lie between 0 and 1, got {validation_fraction}"
        )
    if shard_tokens < 1:
        raise UserError(f"shard_tokens must be positive, got {shard_tokens}")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens must be positive, got {max_tokens}")
    if workers < 1:
        raise UserError(f"workers must be positive, got {workers}")
    # Asked before anything is read: a tokenizer without EOS cannot close documents.
    closing(tokenizer, ends)
    out = Path(out).expanduser()
    reading = read_corpus(corpus)
    with _new_directory(out) as folder:
        # First, because processes that tokenize load it from there.
        tokenizer.save(folder / TOKENIZER)
        written = _write_tokens(
            folder,
            _encoded(
                reading, tokenizer, folder / TOKENIZER, ends=ends, workers=workers
            ),
            vocabulary=tokenizer.vocabulary,
            shard_tokens=shard_tokens,
            max_tokens=max_tokens,
            progress=lambda done, documents, tokens: progress(
                _progress(done, reading.total, documents, tokens, max_tokens)
            ),
        )
        # Into memory first: its checksum is that of the bytes on disk.
        index = io.BytesIO()
        np.save(index, written.starts)
        (folder / INDEX).write_bytes(index.getvalue())
        manifest = Manifest(
            format=FORMAT,
            corpus=repr(corpus),
            tokenizer_hash=tokenizer.hash,
            vocabulary=tokenizer.vocabulary,
            dtype=token_dtype(tokenizer.vocabulary).__name__,
            block=BLOCK,
            documents=len(written.starts),
            tokens=written.tokens,
            text_bytes=written.text_bytes,
            validation_fraction=validation_fraction,
            # Where validation begins is found in the written tokens, which need a
            # manifest to be read; so the first one says that all is training.
            train_tokens=written.tokens,
            validation_tokens=0,
            index_sha256=hashlib.sha256(index.getvalue()).hexdigest(),
            shards=written.shards,
            version=VERSION,
        )
        cut = validation_start(
            PreparedStream(folder, manifest),
            document_bytes=written.document_bytes,
            tokenizer=tokenizer,
            fraction=validation_fraction,
        )
        manifest = replace(
            manifest, train_tokens=cut, validation_tokens=manifest.tokens - cut
        )
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _encoded(
    reading: Reading,
    tokenizer: Tokenizer,
    saved: Path,
    *,
    ends: bool | None,
    workers: int,
) -> Iterator[EncodedDocument]:
    if workers == 1:
        return encoded_documents(reading, tokenizer, ends=ends)
    return encode_in_processes(reading, saved, workers=workers, ends=ends)


class _Written(NamedTuple):
    starts: np.ndarray
    document_bytes: np.ndarray
    tokens: int
    text_bytes: int
    shards: tuple[Shard, ...]


def _write_tokens(
    folder: Path,
    encoded: Iterator[EncodedDocument],
    *,
    vocabulary: int,
    shard_tokens: int,
    max_tokens: int | None,
    progress: Callable[[int, int, int], None],
) -> _Written:
    # Shards end at whole records, so that token t is in record t // BLOCK throughout.
    writer = _ShardWriter(folder, -(-shard_tokens // BLOCK))
    dtype = np.dtype(token_dtype(vocabulary)).newbyteorder("<")
    size = BLOCK * dtype.itemsize
    # Eight bytes a document: lists of Python's numbers would take five times as much.
    starts, document_bytes = array("q"), array("q")
    tokens = text_bytes = 0
    # Bytes that make no whole record yet wait for the next document.
    pending = b""
    for document in encoded:
        starts.append(tokens)
        document_bytes.append(document.token_bytes)
        tokens += len(document.ids)
        text_bytes += document.text_bytes
        pending += document.ids.astype(dtype).tobytes()
        whole = len(pending) - len(pending) % size
        for begin in range(0, whole, size):
            writer.write(pending[begin : begin + size])
        pending = pending[whole:]
        progress(document.done, len(starts), tokens)
        if max_tokens is not None and tokens >= max_tokens:
            break
    if pending:
        writer.write(pending)
    return _Written(
        starts=np.array(starts, np.int64),
        document_bytes=np.array(document_bytes, np.int64),
        tokens=tokens,
        text_bytes=text_bytes,
        shards=writer.finish(),
    )


def _progress(
    done: int, total: int, documents: int, tokens: int, max_tokens: int | None
) -> Progress:
    """Measures the way in tokens where they come to an end before the corpus does."""
    # Whichever limit is nearer tells how far the work has come.
    if max_tokens is not None and tokens * total > done * max_tokens:
        done, total = min(tokens, max_tokens), max_tokens
    return Progress(done, total, documents, tokens)


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """Yields a folder beside `out` that becomes `out` when all went well."""
    try:
        with new_folder(out) as partial:
            yield partial
    except (OSError, RuntimeError) as error:  # ArrayRecord raises RuntimeError
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error):
            raise UserError(
                f"the disk is full: nothing was kept at {out}; free some space or "
                "choose another disk"
            ) from error
        raise UserError(f"cannot write {out}: {error}") from error


class _ShardWriter:
    """Writes records to files of `per_shard` records each."""

    def __init__(self, folder: Path, per_shard: int):
        self._folder, self._per_shard = folder, per_shard
        self._shards: list[Shard] = []
        self._records = 0
        self._writer: ArrayRecordWriter | None = None

    def write(self, record: bytes) -> None:
        if self._records == self._per_shard:
            self._close()
        # group_size 1: each record can be read alone, which random access needs.
        writer = self._writer or ArrayRecordWriter(str(self._path()), "group_size:1")
        self._writer = writer
        writer.write(record)
        self._records += 1

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
                records=self._records,
                size=path.stat().st_size,
                sha256=sha256_of(path),
            )
        )
        self._writer, self._records = None, 0
