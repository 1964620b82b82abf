"""Reads documents out of record files: Parquet, ArrayRecord, tensorflow-datasets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from array_record.python.array_record_data_source import ArrayRecordDataSource

from recurjax.data.config import ArrayRecords, Parquet, Tfds
from recurjax.data.corpora.files import CorpusFile, matching_files, null_in
from recurjax.errors import UserError, first_few

_AT_ONCE = 256
"""Records fetched by one call: single reads of ArrayRecord are ten times slower."""


def read_records(
    corpus: Parquet | ArrayRecords | Tfds,
) -> tuple[int, Iterator[tuple[str, int]]]:
    """Returns the number of records and an iterator of (text, records read so far).

    Raises:
      UserError: no such file, not a file of that format, no such field or split, or the
        package that reads it is not installed.
    """
    match corpus:
        case Parquet():
            return _parquet(corpus)
        case ArrayRecords():
            files = matching_files(corpus.patterns)
            return _chained([_array_record(file) for file in files])
        case Tfds():
            return _tfds(corpus)


def _parquet(corpus: Parquet) -> tuple[int, Iterator[tuple[str, int]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            "reading Parquet needs pyarrow: pip install 'recurjax[parquet]'"
        ) from error
    files = matching_files(corpus.patterns)
    # Only the footers are read here: counts and columns, for messages before the work.
    total = 0
    for file in files:
        try:
            with file.open() as opened, pq.ParquetFile(opened) as table:
                schema = table.schema_arrow
                total += table.metadata.num_rows
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{file} is not a Parquet file: {error}") from error
        if corpus.field not in schema.names:
            raise UserError(
                f"{file} has no column {corpus.field!r}; "
                f"it has: {first_few(schema.names, separator=', ')}"
            )
        kind = schema.field(corpus.field).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not is_text and not pa.types.is_string_view(kind):
            raise UserError(
                f"{file}: column {corpus.field!r} must hold strings, it holds {kind}"
            )

    def documents() -> Iterator[tuple[str, int]]:
        done = 0
        for file in files:
            before = done
            try:
                with pq.ParquetFile(file.local()) as table:
                    # One column, some rows at a time: other columns are never read.
                    for batch in table.iter_batches(_AT_ONCE, columns=[corpus.field]):
                        for text in batch.column(0).to_pylist():
                            done += 1
                            if text is None:
                                where = f"{file}: row {done - before}"
                                raise UserError(null_in(where, corpus.field))
                            yield text, done
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"cannot read {file}: {error}") from error

    return total, documents()


def parquet_column(file: CorpusFile, field: str) -> Iterator[Any]:
    """Yields a column's values, as Python's own.

    Raises:
      UserError: no Parquet file, no such column, or pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            "reading Parquet needs pyarrow: pip install 'recurjax[parquet]'"
        ) from error
    try:
        with pq.ParquetFile(file.local()) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise UserError(
                    f"{file} has no column {field!r}; it has: "
                    f"{first_few(names, separator=', ')}"
                )
            for batch in table.iter_batches(_AT_ONCE, columns=[field]):
                yield from batch.column(0).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _array_record(file: CorpusFile) -> tuple[str, Any]:
    try:
        return str(file), ArrayRecordDataSource(str(file.local()))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{file} is an incomplete ArrayRecord file: {error}") from error


def _tfds(corpus: Tfds) -> tuple[int, Iterator[tuple[str, int]]]:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(
            "reading a TFDS folder needs tensorflow-datasets: "
            "pip install 'recurjax[tfds]'"
        ) from error
    folder = Path(corpus.directory).expanduser()
    if not (folder / "dataset_info.json").is_file():
        raise UserError(
            f"{folder} is not a TFDS data set: it has no dataset_info.json (name the "
            "folder of one version, such as DATA_DIR/NAME/1.0.0)"
        )
    builder: Any = tfds.builder_from_directory(folder)
    if corpus.split not in builder.info.splits:
        names = ", ".join(sorted(builder.info.splits))
        raise UserError(f"{folder} has no split {corpus.split!r}; it has: {names}")
    features = builder.info.features
    known = isinstance(features, tfds.features.FeaturesDict)
    # Some data sets are a single feature without names.
    names = sorted(features.keys()) if known else []
    if corpus.field not in names:
        raise UserError(
            f"{folder} has no field {corpus.field!r}; it has: {', '.join(names)}"
        )
    try:
        source = builder.as_data_source(corpus.split)
    except NotImplementedError as error:
        raise UserError(
            f"{folder} is not stored as ArrayRecord: prepare it again with "
            'file_format="array_record"'
        ) from error
    return _chained([(str(folder), source)], field=corpus.field)


def _chained(
    sources: list[tuple[str, Any]], field: str | None = None
) -> tuple[int, Iterator[tuple[str, int]]]:
    def documents() -> Iterator[tuple[str, int]]:
        done = 0
        for name, source in sources:
            for start in range(0, len(source), _AT_ONCE):
                # The last read may be of fewer records: a source refuses numbers beyond
                # its end.
                indices = range(start, min(start + _AT_ONCE, len(source)))
                try:
                    rows = source.__getitems__(list(indices))
                except RuntimeError as error:
                    raise UserError(f"{name} is damaged: {error}") from error
                for row in rows:
                    done += 1
                    yield _text(row if field is None else row[field], name, done), done

    return sum(len(source) for _, source in sources), documents()


def _text(value: Any, name: str, number: int) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise UserError(
            f"{name}: record {number} must be text, got {type(value).__name__}"
        )
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: record {number} is not UTF-8 text") from error
