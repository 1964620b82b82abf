"""Tokenizes a corpus once, into a directory that any number of runs read.

Several processes may tokenize, or several machines whose parts `merge` joins; the
output is the same byte for byte.
"""

import errno
import hashlib
import io
import multiprocessing
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recurjax.data.config import Corpus
from recurjax.data.corpora import CorpusReading, Document, read_corpus
from recurjax.data.prepared.directory import (
    FORMAT,
    INDEX,
    MANIFEST,
    TOKENIZER,
    PreparedManifest,
    PreparedStream,
    Shard,
    read_manifest,
    verify_checksums,
)
from recurjax.data.prepared.partial import Partial, PartialState, partial_folder
from recurjax.data.streams import (
    EncodedDocument,
    closing,
    encode_group,
    encoded_documents,
    groups_of,
    token_dtype,
    validation_start,
)
from recurjax.data.tokenizers import Tokenizer, load_tokenizer
from recurjax.errors import UserError
from recurjax.files.arrays import Expected, read_array
from recurjax.files.atomic import sha256_of
from recurjax.files.json_files import json_text, read_json_object
from recurjax.version import VERSION

BLOCK = 1024
"""Tokens in a record."""

PART = "part.json"
BYTES = "document_bytes.npy"
"""What only a part has: what it is a part of, and the bytes of its documents."""

_COPIED_AT_ONCE = BLOCK << 10
"""Tokens of a part that are copied at a time."""

_AHEAD = 2
"""Groups waiting for each process: one that it works on, and the next."""


class Written(NamedTuple):
    """The tokens written so far, with their files; fields as in `PartialState`."""

    starts: np.ndarray
    document_bytes: np.ndarray
    tokens: int
    text_bytes: int
    counted_bytes: int
    shards: tuple[Shard, ...]


class Progress(NamedTuple):
    """The progress of `prepare`; `done` of `total` is the share of the corpus."""

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
) -> PreparedManifest:
    """Writes a prepared directory: `directory.py` tells what is in it.

    The directory appears complete or not at all. Calling a stopped preparation again
    with the same arguments continues after its last full shard.

    Args:
      corpus: what to tokenize, in this order.
      tokenizer: is saved along with the tokens.
      out: the new directory; an empty one may be there.
      validation_fraction: the last share of the corpus' bytes, kept for validation.
      shard_tokens: tokens in a file, rounded up to full records.
      ends: whether EOS comes after each document: see `encoded_documents`.
      max_tokens: no document starts after this many tokens; None: no limit.
      workers: processes that tokenize; what is written does not depend on it.
      part: (i, n): only the i-th, counted from 1, of n stretches of the corpus, for
        `merge` to join.
      progress: is called after each document.

    Raises:
      UserError: `out` is taken, the corpus cannot be read, the disk is full.
    """
    _check(validation_fraction, shard_tokens, max_tokens, workers, part)
    # Check before reading anything: a tokenizer without EOS cannot close documents.
    closing(tokenizer, ends)
    out = Path(out).expanduser()
    reading = read_corpus(corpus)
    # All that decides what is written: only the same call continues with its work.
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
        folder, state = partial.folder, partial.state
        # First, because processes that tokenize load it from there.
        tokenizer.save(folder / TOKENIZER)
        # Read the finished documents again and skip them, which is cheap compared with
        # tokenizing.
        unread = islice(reading.documents, state.documents, None)
        written = _write_tokens(
            partial,
            _encoded(
                CorpusReading(total=reading.total, documents=unread),
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


def merge(
    parts: Sequence[str | Path],
    out: str | Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> PreparedManifest:
    """Joins parts that `prepare` wrote into what one call would have written.

    The tokens, their files and the manifest are the same, byte for byte.

    Args:
      parts: the directories, in any order.
      out: the new directory; it is written atomically.
      progress: is called from time to time.

    Raises:
      UserError: `out` is taken, a directory is not a part, one is missing or there
        twice, or they are parts of different preparations.
    """
    out = Path(out).expanduser()
    by_part = _parts([Path(part).expanduser() for part in parts])
    manifests = [read_manifest(folder) for folder, _ in by_part]
    of = by_part[0][1]
    tokenizer = load_tokenizer(by_part[0][0] / TOKENIZER)
    # One part's serves for all: that they name the same one was checked with the rest.
    if tokenizer.hash != of["tokenizer"]:
        raise UserError(
            f"{by_part[0][0] / TOKENIZER} did not make the tokens of its part: "
            "prepare that part again"
        )
    total = sum(manifest.tokens for manifest in manifests)
    with written_to(out, {"merged": [m.index_sha256 for m in manifests]}) as partial:
        folder = partial.folder
        tokenizer.save(folder / TOKENIZER)
        writer = ShardWriter(folder, records_of(of["shard_tokens"]))
        dtype = stored_type(tokenizer.vocabulary)
        # A part may end inside a record, which the next part's first tokens then fill.
        pending = b""
        before, starts, sizes = 0, [], []
        for (part, _), manifest in zip(by_part, manifests, strict=True):
            # A damaged part would be written with new checksums, and never be found.
            verify_checksums(part)
            stream = PreparedStream(part, manifest)
            for begin in range(0, stream.tokens, _COPIED_AT_ONCE):
                end = min(begin + _COPIED_AT_ONCE, stream.tokens)
                [ids] = stream.read([(begin, end)])
                pending = writer.write_whole_records(
                    pending + ids.astype(dtype).tobytes(), BLOCK * dtype.itemsize
                )
                documents = int(np.searchsorted(stream.starts, end))
                tokens = sum(map(len, starts)) + documents
                progress(Progress(before + end, total, tokens, before + end))
            # Starts of documents count from the first token of the first part.
            starts.append(stream.starts + before)
            expected = Expected("i", (manifest.documents,))
            sizes.append(read_array(part / BYTES, expected, f"{part / BYTES}"))
            before += stream.tokens
        if pending:
            writer.write(pending)
        written = Written(
            starts=np.concatenate(starts),
            document_bytes=np.concatenate(sizes),
            tokens=total,
            text_bytes=sum(manifest.text_bytes for manifest in manifests),
            counted_bytes=_counted(manifests),
            shards=writer.finish(),
        )
        return write_manifest(
            folder,
            written,
            corpus=of["corpus"],
            tokenizer=tokenizer,
            validation_fraction=of["validation_fraction"],
        )


def stretch(reading: CorpusReading, part: int, parts: int) -> CorpusReading:
    """Returns the documents that begin in one of equal stretches of a corpus.

    Each document is in exactly one stretch, and the stretches in order make up the
    corpus. Text before the stretch is read and skipped.

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

    return CorpusReading(total=reading.total, documents=documents())


def _check(
    validation_fraction: float,
    shard_tokens: int,
    max_tokens: int | None,
    workers: int,
    part: tuple[int, int] | None,
) -> None:
    if not 0.0 <= validation_fraction <= 1.0:
        raise UserError(
            f"validation_fraction must be between 0 and 1, got {validation_fraction}"
        )
    if shard_tokens < 1:
        raise UserError(f"shard_tokens must be positive, got {shard_tokens}")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens must be positive, got {max_tokens}")
    if workers < 1:
        raise UserError(f"workers must be positive, got {workers}")
    if part is not None and not 1 <= part[0] <= part[1]:
        raise UserError(
            f"part {part[0]}/{part[1]} does not exist: parts are numbered from "
            "1, so the last of four is 4/4"
        )
    if part is not None and max_tokens is not None:
        raise UserError(
            "max_tokens counts from the beginning of the corpus, which a part "
            "does not see: leave one of the two out"
        )


def _write_part(
    folder: Path, part: tuple[int, int], of: dict[str, Any], written: Written
) -> None:
    if not len(written.starts):
        raise UserError(
            f"no document begins in part {part[0]}/{part[1]} of the corpus: "
            "use fewer parts"
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
) -> PreparedManifest:
    """Writes the index and, last, the manifest."""
    # Into memory first: its checksum is that of the bytes on disk.
    index = io.BytesIO()
    np.save(index, written.starts)
    (folder / INDEX).write_bytes(index.getvalue())
    manifest = PreparedManifest(
        format=FORMAT,
        corpus=corpus,
        tokenizer_hash=tokenizer.hash,
        vocabulary=tokenizer.vocabulary,
        dtype=token_dtype(tokenizer.vocabulary).__name__,
        block=BLOCK,
        documents=len(written.starts),
        tokens=written.tokens,
        text_bytes=written.text_bytes,
        counted_bytes=written.counted_bytes,
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
    reading: CorpusReading,
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
    done, dtype = partial.state, stored_type(vocabulary)
    # Shards end at record borders, so that token t is in record t // BLOCK throughout.
    writer = ShardWriter(partial.folder, records_of(shard_tokens), done.shards)
    size = BLOCK * dtype.itemsize
    # Eight bytes per document: lists of Python's numbers would take five times as much.
    starts = array("q", np.asarray(done.starts, np.int64).tobytes())
    document_bytes = array("q", np.asarray(done.document_bytes, np.int64).tobytes())
    tokens, text_bytes = done.tokens, done.text_bytes
    # A part that was not counted leaves the sum of all unknown.
    counts = bool(done.counted_bytes) or not done.documents
    counted_bytes = done.counted_bytes
    # Bytes that do not fill a record yet wait for the next document.
    pending = writer.write_whole_records(done.tail, size)
    # It was stopped after its last document: none is begun beyond the limit.
    if max_tokens is not None and starts and tokens >= max_tokens:
        encoded = iter(())
    for document in encoded:
        starts.append(tokens)
        document_bytes.append(document.table_bytes)
        tokens += len(document.ids)
        text_bytes += document.text_bytes
        counted_bytes += document.counted_bytes * counts
        full = len(writer.shards)
        joined = pending + document.ids.astype(dtype).tobytes()
        pending = writer.write_whole_records(joined, size)
        if len(writer.shards) > full:
            # A shard ends where a record does, and so in what was joined here.
            records = sum(shard.records for shard in writer.shards)
            beyond = tokens * dtype.itemsize - records * size
            partial.keep(
                PartialState(
                    documents=len(starts),
                    starts=starts,
                    document_bytes=document_bytes,
                    tokens=tokens,
                    text_bytes=text_bytes,
                    counted_bytes=counted_bytes,
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
        counted_bytes=counted_bytes,
        shards=writer.finish(),
    )


def _counted(manifests: Sequence[PreparedManifest]) -> int:
    """Sums the counts of all parts; 0: a part has none."""
    counts = [manifest.counted_bytes for manifest in manifests]
    return sum(counts) if all(counts) else 0


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
    """Yields a folder next to `out` that becomes `out` on success."""
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
                f"the disk is full: {len(partial.state.shards)} full shards are kept "
                f"in {partial.folder}; free some space and give the command again"
            ) from error
        raise UserError(
            f"the disk is full and nothing of {out} is kept: free some space "
            "or choose another disk"
        ) from error


def _parts(folders: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Reads what parts are of, and puts them in their order."""
    by_number: dict[int, tuple[Path, dict[str, Any]]] = {}
    first: tuple[Path, dict[str, Any]] | None = None
    count = 0
    for folder in folders:
        if not (folder / PART).is_file():
            raise UserError(
                f"{folder} is not a part of a prepared corpus: make parts with "
                "`recurjax data prepare --part`"
            )
        of = read_json_object(folder / PART, "what a part is of")
        number, count = of.pop("part")
        first = first or (folder, {**of, "parts": count})
        # All but the number of the part itself must be alike.
        mine = {**of, "parts": count}
        differing = [name for name in mine if mine[name] != first[1].get(name)]
        if differing:
            raise UserError(
                f"{folder} and {first[0]} were prepared with different settings "
                f"({', '.join(differing)}): prepare all parts with the same"
            )
        if number in by_number:
            raise UserError(
                f"{folder} and {by_number[number][0]} are both part "
                f"{number}/{count}: name one of them"
            )
        by_number[number] = folder, mine
    missing = [str(n) for n in range(1, count + 1) if n not in by_number]
    if missing or not by_number:
        raise UserError(
            f"part {', '.join(missing)} of {count} is missing: name all of them"
            if by_number
            else "name the parts to merge"
        )
    return [by_number[number] for number in sorted(by_number)]


def records_of(shard_tokens: int) -> int:
    """Counts the records of a file that is full."""
    return -(-shard_tokens // BLOCK)


class ShardWriter:
    """Writes records to files of `per_shard` records each."""

    def __init__(self, folder: Path, per_shard: int, shards: tuple[Shard, ...] = ()):
        """Continues after the existing shards."""
        self._folder, self._per_shard = folder, per_shard
        self._shards = list(shards)
        self.records_of = 0
        self._writer: Any = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files that are full."""
        return tuple(self._shards)

    def write_whole_records(self, data: bytes, size: int) -> bytes:
        """Writes records of `size` bytes and returns what does not make one."""
        end = len(data) - len(data) % size
        for begin in range(0, end, size):
            self.write(data[begin : begin + size])
        return data[end:]

    def write(self, record: bytes) -> None:
        if self.records_of == self._per_shard:
            self._close()
        from array_record.python.array_record_module import ArrayRecordWriter

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


def encode_in_processes(
    reading: CorpusReading, saved: Path, *, workers: int, ends: bool | None
) -> Iterator[EncodedDocument]:
    """Yields what `encoded_documents` yields, tokenized by `workers` processes.

    This process reads the corpus and hands groups of documents on; it takes a group's
    tokens before those of the next group, which keeps the corpus' order.

    Args:
      reading: the corpus.
      saved: a folder with the tokenizer, which each process loads for itself.
      workers: how many.
      ends: see `encoded_documents`.

    Raises:
      UserError: a process was ended from outside.
    """
    pool = ProcessPoolExecutor(
        workers,
        # A fork would copy the threads' locks of what this process has imported.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(str(saved), ends),
    )
    waiting: deque[Future[list[EncodedDocument]]] = deque()
    try:
        for group in groups_of(reading):
            waiting.append(pool.submit(_encode, group))
            # The oldest group is waited for, so that documents come in the corpus'
            # order and no more than a few groups are in memory.
            if len(waiting) > _AHEAD * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "the system ended a tokenizing process, most likely for lack of "
            "memory: use fewer --workers"
        ) from error
    finally:
        # Groups that nobody will read are dropped; a running one is waited for.
        pool.shutdown(wait=True, cancel_futures=True)


_tokenizer: Tokenizer | None = None
_ends: bool | None = None


def _begin(saved: str, ends: bool | None) -> None:
    global _tokenizer, _ends
    # One thread each: the processes are as many as there are cores to use.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer, _ends = load_tokenizer(saved), ends


def _encode(group: list[Document]) -> list[EncodedDocument]:
    assert _tokenizer is not None
    return list(encode_group(group, _tokenizer, ends=_ends))
