"""A prepared directory: ArrayRecord shards of tokens, an index and a manifest.

    manifest.json            what follows, with counts, split and checksums
    tokenizer/               the tokenizer that made the tokens
    documents.npy            int64 [documents]: the token at which each one begins
    tokens-00000.arrayrecord ...

The stream of tokens is cut into records of `block` tokens each, whatever documents they
belong to (the last record is shorter), so that token t is in record t // block.
"""

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from recurjax.data.streams import Span
from recurjax.errors import UserError
from recurjax.files.arrays import Expected, read_array
from recurjax.files.atomic import inside, new_folder, sha256_of
from recurjax.files.json_files import read_json_object
from recurjax.files.storage import (
    Store,
    check_object,
    copy_of,
    folder_for,
    mended_copy_of,
    open_store,
    url_of,
)
from recurjax.version import refuse_newer

FORMAT = 1
MANIFEST = "manifest.json"
INDEX = "documents.npy"
TOKENIZER = "tokenizer"
DTYPES = ("uint16", "uint32")
_ORIGIN = "origin.txt"
"""In a copy of a directory of a store: its URL. Shards and index are fetched apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of records."""

    file: str
    records: int
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedManifest:
    """The manifest of a prepared directory, which is written last.

    Attributes:
      format: format number of this directory; another number is refused.
      corpus: what it was made from, in words.
      tokenizer_hash: hash of the tokenizer that made the tokens.
      vocabulary: V of that tokenizer.
      dtype: dtype of the tokens in the records, little endian.
      block: tokens in a record.
      documents: how many.
      tokens: in all, with the BOS of each document.
      text_bytes: bytes of the documents, in UTF-8.
      counted_bytes: bytes of their tokens, by `byte_table`; 0: an earlier version did
        not count them.
      validation_fraction: as requested, a share of the bytes.
      train_tokens: the length of the training split, which comes first.
      validation_tokens: the rest.
      index_sha256: checksum of documents.npy.
      shards: the files, in order.
      version: version of recurjax that wrote it; "": one before 0.1.0.
    """

    format: int
    corpus: str
    tokenizer_hash: str
    vocabulary: int
    dtype: str
    block: int
    documents: int
    tokens: int
    text_bytes: int
    validation_fraction: float
    train_tokens: int
    validation_tokens: int
    index_sha256: str
    shards: tuple[Shard, ...]
    version: str = ""
    counted_bytes: int = 0

    def to_json(self) -> str:
        values = json.loads(json.dumps(asdict(self)))
        return json.dumps({**values, "digest": _digest(values)}, indent=1) + "\n"


class PreparedStream:
    """The tokens of a prepared directory, read on demand."""

    def __init__(self, directory: Path, manifest: PreparedManifest):
        """Opens the shards.

        Raises:
          UserError: a file is missing, has another size than the manifest says, or is
            damaged. Damage inside a shard is found when the record is read.
        """
        self.tokens = manifest.tokens
        self._manifest = manifest
        self._paths = [_shard(directory, shard) for shard in manifest.shards]
        self._origin = _origin(directory)
        for path, shard in zip(self._paths, manifest.shards, strict=True):
            if self._origin is not None:
                break  # each is checked when it is fetched
            if not path.is_file():
                # Opening compares sizes; each read checks its records, and
                # `verify_checksums` checks entire files.
                raise UserError(f"shard {path} is missing: prepare the data again")
            if path.stat().st_size != shard.size:
                raise UserError(
                    f"shard {path} has {path.stat().st_size} bytes and the manifest "
                    f"says {shard.size}: prepare the data again"
                )
        self._source = self._opened()
        index = directory / INDEX
        if self._origin is not None:
            expected = manifest.index_sha256
            index = mended_copy_of(self._origin, INDEX, sha256=expected)
        self.starts = _read_index(index, manifest)

    def read(self, spans: Sequence[Span]) -> list[Int32[np.ndarray, " _"]]:
        block = self._manifest.block
        # The records that each span touches, from the first to the last.
        ranges = [range(start // block, -(-stop // block)) for start, stop in spans]
        # Spans of one batch often share a record, which is then read once.
        blocks_read = sorted({b for blocks in ranges for b in blocks})
        records = dict(zip(blocks_read, self._records(blocks_read), strict=True))
        dtype = np.dtype(self._manifest.dtype).newbyteorder("<")
        read = []
        for (start, stop), blocks in zip(spans, ranges, strict=True):
            joined = b"".join([records[b] for b in blocks])
            tokens = np.frombuffer(joined, dtype)
            # The span's place in the first of its records.
            first = start - blocks.start * block
            read.append(tokens[first : first + stop - start].astype(np.int32))
        return read

    def _opened(self) -> "_Records":
        if self._origin is not None:
            return _Fetched(self._origin, self._manifest)
        try:
            source = _open_records(self._paths)
        except RuntimeError as error:
            raise UserError(
                f"the shards in {self._paths[0].parent} are damaged ({error}): "
                "prepare the data again"
            ) from error
        # A shard of right size and wrong content would shift every token after it.
        if len(source) != -(-self.tokens // self._manifest.block):
            raise UserError(
                f"the shards in {self._paths[0].parent} hold {len(source)} "
                f"records, which do not match the manifest's {self.tokens} tokens: "
                "prepare the data again"
            )
        return source

    def _records(self, blocks: list[int]) -> Sequence[bytes]:
        try:
            # Read one by one: ArrayRecord starts new threads for each call with several
            # records, which costs more than the reads (16 records: 2.6 ms of CPU time
            # instead of 0.4 ms). Other threads already read batches ahead.
            return [self._source[record] for record in blocks]
        except RuntimeError as error:
            shard = self._damaged_shard(blocks)
            raise UserError(
                f"shard {shard} is damaged ({error}): prepare the data again"
            ) from error

    def _damaged_shard(self, blocks: list[int]) -> Path | str:
        # Numbers of records up to and with each shard.
        last = np.cumsum([shard.records for shard in self._manifest.shards])
        for record in blocks:
            try:
                self._source[record]
            except RuntimeError:
                shard = self._paths[int(np.searchsorted(last, record, side="right"))]
                if self._origin is None:
                    return shard
                return f"{self._origin.url}/{shard.name}"
        return self._paths[0].parent


@runtime_checkable
class _Records(Protocol):
    """Records by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, record: int, /) -> bytes: ...


def _open_records(files: Sequence[Path]) -> _Records:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource([str(file) for file in files])


class _Fetched:
    """The records of shards in a store: a shard is fetched when it is first read."""

    def __init__(self, store: Store, manifest: PreparedManifest):
        self._store, self._shards = store, manifest.shards
        self._ends = list(accumulate(shard.records for shard in manifest.shards))
        self._opened: dict[int, _Records] = {}
        self._opening = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, record: int) -> bytes:
        home = bisect_right(self._ends, record)
        within = record - self._ends[home] + self._shards[home].records
        try:
            return self._shard(home)[within]
        except RuntimeError:
            # The copy may have been damaged here: then the store's own serves.
            self._mend(home)
            return self._shard(home)[within]

    def _mend(self, number: int) -> None:
        shard = self._shards[number]
        # Of several threads that met the damage the first fetches the shard.
        with self._opening:
            mended_copy_of(self._store, shard.file, sha256=shard.sha256)
            self._opened.pop(number, None)

    def _shard(self, number: int) -> "_Records":
        # Threads read ahead together: the first that asks fetches, the others wait.
        with self._opening:
            if number not in self._opened:
                shard = self._shards[number]
                file = copy_of(self._store, shard.file, sha256=shard.sha256)
                self._opened[number] = _open_records([file])
            return self._opened[number]


def prepared_here(directory: str | Path) -> Path:
    """Returns a prepared directory as a folder of this machine.

    Of one in a store it is a copy in the user's cache without index and shards: those
    are fetched, once, when they are read.

    Raises:
      UserError: it is in a store that cannot be read or has no such directory.
    """
    url = url_of(directory)
    if url is None:
        return Path(directory).expanduser()
    store = open_store(url)
    if store.size(MANIFEST) is None:
        raise UserError(_no_manifest(url))
    content = store.read(MANIFEST)
    # Keyed by the manifest's digest: data prepared again at the same place get a new
    # copy.
    folder = folder_for(url, hashlib.sha256(content).hexdigest()) / "prepared"
    if (folder / _ORIGIN).is_file():
        return folder
    names = [name for name in store.sizes() if name.startswith(f"{TOKENIZER}/")]
    try:
        with new_folder(folder) as target:
            for name in names:
                store.fetch(name, target / name)
            (target / MANIFEST).write_bytes(content)
            (target / _ORIGIN).write_text(url, encoding="utf-8")
    except (UserError, OSError):
        if not (folder / _ORIGIN).is_file():  # else another process was faster
            raise
    return folder


def _origin(directory: Path) -> Store | None:
    file = directory / _ORIGIN
    return open_store(file.read_text(encoding="utf-8")) if file.is_file() else None


def _no_manifest(directory: object) -> str:
    return (
        f"{directory} is not a prepared directory: {MANIFEST} is missing; "
        "make one with `recurjax data prepare`"
    )


def read_manifest(directory: Path) -> PreparedManifest:
    """Reads what a prepared directory holds.

    Raises:
      UserError: not a prepared directory, or one of another format.
    """
    file = directory / MANIFEST
    if not file.is_file():
        raise UserError(_no_manifest(directory))
    try:
        values = read_json_object(file, "the manifest")
    except UserError as error:
        raise UserError(
            f"{file} is damaged: prepare the data again ({error})"
        ) from error
    if values.get("format") != FORMAT:
        raise UserError(
            f"{file} has format {values.get('format')!r} and this version reads "
            f"{FORMAT}: prepare the data again"
        )
    refuse_newer(values.get("version", ""), file)
    digest = values.pop("digest", None)
    # The digest is of what was written, before defaults for old directories are added.
    written = dict(values)
    values.setdefault("version", "")
    shards = values.get("shards")
    if not isinstance(shards, list) or not shards:
        raise UserError(
            f"{file} is damaged (it names no shards): prepare the data again"
        )
    read = tuple(Shard(**_checked(Shard, shard, file)) for shard in shards)
    manifest = PreparedManifest(
        **_checked(PreparedManifest, values | {"shards": read}, file)
    )
    if manifest.dtype not in DTYPES or manifest.block < 1:
        raise UserError(
            f"{file} is damaged (dtype {manifest.dtype!r}, block "
            f"{manifest.block}): prepare the data again"
        )
    if manifest.train_tokens + manifest.validation_tokens > manifest.tokens:
        raise UserError(
            f"{file} is damaged (its splits exceed its tokens): prepare the data again"
        )
    # Older versions wrote no digest.
    if digest not in (None, _digest(written)):
        raise UserError(
            f"{file} is damaged (its digest does not match): prepare "
            "the data again or put the manifest back"
        )
    return manifest


def _checked(kind: type, values: Any, file: Path) -> dict[str, Any]:
    """Returns the fields of a `Shard` or a `PreparedManifest` and drops all others.

    Raises:
      UserError: one is missing, of another type or negative.
    """
    shards = {}
    for field in fields(kind):
        value = values.get(field.name) if isinstance(values, dict) else None
        # dataclasses keep a field's type as the class itself here; tuples are the rest.
        expected = {"int": int, "str": str, "float": (int, float)}.get(
            getattr(field.type, "__name__", ""), tuple
        )
        fits = isinstance(value, expected) and not isinstance(value, bool)
        if not fits or (isinstance(value, int | float) and not 0 <= value < 1 << 63):
            raise UserError(
                f"{file} is damaged ({field.name} is {value!r}): prepare the data again"
            )
        shards[field.name] = value
    return shards


def _shard(directory: Path, shard: Shard) -> Path:
    return inside(directory, shard.file, source=directory / MANIFEST)


def verify_checksums(directory: Path) -> None:
    """Reads every shard through and compares its SHA-256 with the manifest's.

    Of a directory in a store its own shards and index are read, and not the copies.

    Raises:
      UserError: a shard is missing or differs.
    """
    origin, manifest = _origin(directory), read_manifest(directory)
    if origin is not None:
        check_object(origin, INDEX, sha256=manifest.index_sha256)
    for shard in manifest.shards:
        if origin is not None:
            check_object(origin, shard.file, sha256=shard.sha256)
            continue
        path = _shard(directory, shard)
        if not path.is_file():
            raise UserError(f"shard {path} is missing: prepare the data again")
        if sha256_of(path) != shard.sha256:
            raise UserError(f"shard {path} is damaged: prepare the data again")


def _digest(values: dict[str, Any]) -> str:
    # One way of writing, so that the digest is of the values and not of a layout.
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read_index(path: Path, manifest: PreparedManifest) -> np.ndarray:
    if not path.is_file():
        raise UserError(f"{path} is missing: prepare the data again")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest.index_sha256:
        raise UserError(f"{path} is damaged: prepare the data again")
    expected = Expected("i", (manifest.documents,))
    return read_array(data, expected, f"the index {path}").astype(np.int64, copy=False)
