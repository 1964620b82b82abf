"""Tokenizes a corpus once, into a directory that any number of runs read."""

import errno
import hashlib
import io
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recurjax.data.config import Corpus
from recurjax.data.corpora import Document, Reading, read_corpus
from recurjax.data.encoding import EncodedDocument, closing, encoded_documents
from recurjax.data.prepared.directory import (
    FORMAT,
    INDEX,
    MANIFEST,
    TOKENIZER,
    Manifest,
    PreparedStream,
    Shard,
)
from recurjax.data.prepared.partial import Kept, Partial, partial_folder
from recurjax.data.prepared.shard_writer import BLOCK, ShardWriter, records_of
from recurjax.data.prepared.workers import encode_in_processes
from recurjax.data.streams import token_dtype, validation_start
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.files.json_files import json_text
from recurjax.version import VERSION

PART = "part.json"
BYTES = "document_bytes.npy"
"""What only a part has: what it is a part of, and the bytes of its documents."""


class Written(NamedTuple):
    """What was tokenized, with its files; the fields are those of `Kept`."""

    starts: np.ndarray
    document_bytes: np.ndarray
    tokens: int
    text_bytes: int
    shards: tuple[Shard, ...]


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
    part: tuple[int, int] | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Writes a prepared directory: `directory.py` tells what is in it.

    The directory appears whole or not at all. What was stopped goes on, when it is
    called in the same way again, after the last shard that was full.

    Args:
      corpus: what to tokenize, in this order.
      tokenizer: is saved along with the tokens.
      out: the new directory; an empty one may be there.
      validation_fraction: the last share of the corpus' bytes, kept for validation.
      shard_tokens: tokens in a file, rounded up to whole records.
      ends: whether EOS comes after each document: see `encoded_documents`.
      max_tokens: no document is begun after so many tokens; None: all are taken.
      workers: processes that tokenize; what is written does not depend on it.
      part: (i, n): only the i-th, counted from 1, of n stretches of the corpus, for
        `merge` to join.
      progress: is called after each document.

    Raises:
      UserError: `out` is taken, the corpus cannot be read, the disk is full.
    """
    _check(validation_fraction, shard_tokens, max_tokens, workers, part)
    # Asked before anything is read: a tokenizer without EOS cannot close documents.
    closing(tokenizer, ends)
    out = Path(out).expanduser()
    reading = read_corpus(corpus)
    # All that decides what is written: only the same call goes on with its work.
    of = {
        "corpus": repr(corpus),
        "size": reading.total,
        "tokenizer": tokenizer.hash,
        "ends": ends,
        "validation_fraction": validation_fraction,
        "shard_tokens": shard_tokens,
        "max_tokens": max_tokens,
        "part": None if part is None else list(part),
    }
    if part is not None:
        reading = stretch(reading, *part)
    with written_to(out, of) as partial:
        folder, kept = partial.folder, partial.kept
        # First, because processes that tokenize load it from there.
        tokenizer.save(folder / TOKENIZER)
        # What is kept is read once more and skipped, which is cheap beside tokenizing.
        left = islice(reading.documents, kept.documents, None)
        written = _write_tokens(
            partial,
            _encoded(
                Reading(total=reading.total, documents=left),
                tokenizer,
                folder / TOKENIZER,
                ends=ends,
                workers=workers,
            ),
            vocabulary=tokenizer.vocabulary,
            shard_tokens=shard_tokens,
            max_tokens=max_tokens,
            progress=lambda done, documents, tokens: progress(
                _progress(done, reading.total, documents, tokens, max_tokens)
            ),
        )
        if part is not None:
            _write_part(folder, part, of, written)
        return write_manifest(
            folder,
            written,
            corpus=repr(corpus),
            tokenizer=tokenizer,
            validation_fraction=validation_fraction,
        )


def stretch(reading: Reading, part: int, parts: int) -> Reading:
    """Returns the documents that begin in one of equal stretches of a corpus.

    Every document is in one of them, and all of them in turn are the corpus. What lies
    before the stretch is read and left out.

    Args:
      reading: the corpus.
      part: which stretch, counted from 1.
      parts: how many there are.
    """

    def documents() -> Iterator[Document]:
        begin = 0
        for document in reading.documents:
            # By where it begins, so that each document has one home.
            home = min(begin * parts // max(1, reading.total), parts - 1)
            # Homes only grow along the corpus: nothing from here on is this part's.
            if home >= part:
                return
            if home == part - 1:
                yield document
            begin = document.done

    return Reading(total=reading.total, documents=documents())


def _check(
    validation_fraction: float,
    shard_tokens: int,
    max_tokens: int | None,
    workers: int,
    part: tuple[int, int] | None,
) -> None:
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
    if part is not None and not 1 <= part[0] <= part[1]:
        raise UserError(
            f"part {part[0]}/{part[1]} does not exist: parts are counted from 1, so "
            "the last of four is 4/4"
        )
    if part is not None and max_tokens is not None:
        raise UserError(
            "max_tokens counts from the corpus' beginning, which a part does not know: "
            "leave one of them out"
        )


def _write_part(
    folder: Path, part: tuple[int, int], of: dict[str, Any], written: Written
) -> None:
    if not len(written.starts):
        raise UserError(
            f"no document begins in part {part[0]}/{part[1]} of the corpus: choose "
            "fewer parts"
        )
    with open(folder / BYTES, "wb") as file:
        np.save(file, written.document_bytes)
    (folder / PART).write_text(json_text(of, indent=1) + "\n", encoding="utf-8")


def write_manifest(
    folder: Path,
    written: Written,
    *,
    corpus: str,
    tokenizer: Tokenizer,
    validation_fraction: float,
) -> Manifest:
    """Writes the index and, last, the manifest."""
    # Into memory first: its checksum is that of the bytes on disk.
    index = io.BytesIO()
    np.save(index, written.starts)
    (folder / INDEX).write_bytes(index.getvalue())
    manifest = Manifest(
        format=FORMAT,
        corpus=corpus,
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


def _write_tokens(
    partial: Partial,
    encoded: Iterator[EncodedDocument],
    *,
    vocabulary: int,
    shard_tokens: int,
    max_tokens: int | None,
    progress: Callable[[int, int, int], None],
) -> Written:
    kept, dtype = partial.kept, stored_type(vocabulary)
    # Shards end at whole records, so that token t is in record t // BLOCK throughout.
    writer = ShardWriter(partial.folder, records_of(shard_tokens), kept.shards)
    size = BLOCK * dtype.itemsize
    # Eight bytes a document: lists of Python's numbers would take five times as much.
    starts = array("q", np.asarray(kept.starts, np.int64).tobytes())
    document_bytes = array("q", np.asarray(kept.document_bytes, np.int64).tobytes())
    tokens, text_bytes = kept.tokens, kept.text_bytes
    # Bytes that make no whole record yet wait for the next document.
    pending = writer.write_whole_records(kept.tail, size)
    # It was stopped after its last document: none is begun beyond the limit.
    if max_tokens is not None and starts and tokens >= max_tokens:
        encoded = iter(())
    for document in encoded:
        starts.append(tokens)
        document_bytes.append(document.token_bytes)
        tokens += len(document.ids)
        text_bytes += document.text_bytes
        full = len(writer.shards)
        joined = pending + document.ids.astype(dtype).tobytes()
        pending = writer.write_whole_records(joined, size)
        if len(writer.shards) > full:
            # A shard ends where a record does, and so in what was joined here.
            records = sum(shard.records for shard in writer.shards)
            beyond = tokens * dtype.itemsize - records * size
            partial.keep(
                Kept(
                    documents=len(starts),
                    starts=starts,
                    document_bytes=document_bytes,
                    tokens=tokens,
                    text_bytes=text_bytes,
                    shards=writer.shards,
                    tail=joined[len(joined) - beyond :],
                )
            )
        progress(document.done, len(starts), tokens)
        if max_tokens is not None and tokens >= max_tokens:
            break
    if pending:
        writer.write(pending)
    return Written(
        starts=np.array(starts, np.int64),
        document_bytes=np.array(document_bytes, np.int64),
        tokens=tokens,
        text_bytes=text_bytes,
        shards=writer.finish(),
    )


def stored_type(vocabulary: int) -> np.dtype:
    """Returns the type of tokens in records."""
    return np.dtype(token_dtype(vocabulary)).newbyteorder("<")


def _progress(
    done: int, total: int, documents: int, tokens: int, max_tokens: int | None
) -> Progress:
    """Measures the way in tokens where they come to an end before the corpus does."""
    # Whichever limit is nearer tells how far the work has come.
    if max_tokens is not None and tokens * total > done * max_tokens:
        done, total = min(tokens, max_tokens), max_tokens
    return Progress(done, total, documents, tokens)


@contextmanager
def written_to(out: Path, of: dict[str, Any]) -> Iterator[Partial]:
    """Yields a folder beside `out` that becomes `out` when all went well."""
    partial: Partial | None = None
    try:
        with partial_folder(out, of) as partial:
            yield partial
    except (OSError, RuntimeError) as error:  # ArrayRecord raises RuntimeError
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left" not in str(error):
            raise UserError(f"cannot write {out}: {error}") from error
        if partial is not None and partial.is_worth_keeping:
            raise UserError(
                f"the disk is full: {len(partial.kept.shards)} whole shards are kept "
                f"in {partial.folder}; free some space and give the command again"
            ) from error
        raise UserError(
            f"the disk is full: nothing was kept at {out}; free some space or "
            "choose another disk"
        ) from error
