import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter

import recurjax.data
from recurjax.data.config import (
    ArrayRecords,
    EmbeddedText,
    JsonLines,
    Parquet,
    Prepared,
    TextFiles,
    Tfds,
)
from recurjax.data.corpora import embedded_text, read_corpus
from recurjax.data.corpora.files import matching_files
from recurjax.errors import UserError

TEXTS = ["first café", "second\nof two lines", "third 🌍"]


class Documents(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict(
            {"text": tfds.features.Text(), "number": np.int64}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i, text in enumerate(TEXTS):
            yield i, {"text": text, "number": i}


@pytest.fixture(scope="session")
def tfds_folder(tmp_path_factory) -> str:
    builder = Documents(
        data_dir=str(tmp_path_factory.mktemp("tfds")), file_format="array_record"
    )
    builder.download_and_prepare()
    return str(builder.data_dir)


def texts_of(corpus) -> list[str]:
    reading = read_corpus(corpus)
    documents = list(reading.documents)
    done = [document.done for document in documents]
    assert done == sorted(done) and done[-1] <= reading.total
    return [document.text for document in documents]


def write_json_lines(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_records(path: Path, records: list[bytes]) -> str:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def test_the_embedded_text_is_one_document_of_ascii_with_its_notice():
    [text] = texts_of(EmbeddedText())
    assert text == embedded_text()
    assert len(text.encode()) == 1_036_467 and text.isascii()
    folder = Path(recurjax.data.__file__).parent / "text"
    assert "Creative Commons" in (folder / "NOTICE").read_text()


def test_text_files_come_in_the_order_of_patterns_each_once(tmp_path):
    for name, text in (("b.txt", "B"), ("a.txt", "A"), ("sub/c.txt", "C")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"D"))
    (tmp_path / "empty.txt").write_text("")
    first, every = str(tmp_path / "b.txt"), str(tmp_path / "**" / "*.txt*")
    assert texts_of(TextFiles(patterns=(first, every))) == ["B", "A", "D", "C"]


def test_a_file_of_two_spellings_is_read_once(tmp_path, monkeypatch):
    """Twice it would be in the validation text what it is in training's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("A")
    (tmp_path / "link.txt").symlink_to("a.txt")
    up = f"../{tmp_path.name}/a.txt"
    spellings = ("a.txt", str(tmp_path / "a.txt"), up, "~/a.txt", "link.txt")
    matches = [corpus_file.name for corpus_file in matching_files(spellings)]
    assert matches == ["a.txt"]


def test_a_separator_cuts_a_file_into_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\nlines\n\n\n\nthree")
    corpus = TextFiles(patterns=(str(tmp_path / "a.txt"),), separator="\n\n")
    assert texts_of(corpus) == ["one", "two\nlines", "three"]


def test_line_ends_are_kept_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r")
    assert texts_of(TextFiles(patterns=(str(tmp_path / "a.txt"),))) == ["one\r\ntwo\r"]


def test_json_lines_are_read_plain_and_packed(tmp_path):
    rows = [{"body": text, "id": i} for i, text in enumerate(TEXTS)]
    plain = write_json_lines(tmp_path / "a.jsonl", rows)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes() + b"\n\n"))
    corpus = JsonLines(patterns=(plain, str(packed)), field="body")
    assert texts_of(corpus) == TEXTS * 2


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83dz \\ud83c\\udf0d"}\n')
    corpus = JsonLines(patterns=(str(tmp_path / "a.jsonl"),))
    assert texts_of(corpus) == ["a\ufffdz 🌍"]


def test_parquet_rows_are_documents_and_nulls_are_refused(tmp_path):
    def write(name: str, rows: list) -> None:
        # In a dictionary, as columns of few texts are.
        texts = pa.array(rows).dictionary_encode() if name == "b" else pa.array(rows)
        table = pa.table({"n": range(len(rows)), "body": texts})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)

    write("a", TEXTS)
    write("b", ["last", "", "last"])
    corpus = Parquet(patterns=(str(tmp_path / "*.parquet"),), field="body")
    assert texts_of(corpus) == [*TEXTS, "last", "last"]
    write("b", ["last", None])
    with pytest.raises(
        UserError,
        match="b.parquet: row 2 has null in 'body', it must hold a string: leave such",
    ):
        texts_of(corpus)


def test_array_records_are_documents(tmp_path):
    many = [f"document {i}" for i in range(600)]
    write_records(tmp_path / "a.array_record", [text.encode() for text in TEXTS])
    write_records(tmp_path / "b.array_record", [text.encode() for text in many])
    corpus = ArrayRecords(patterns=(str(tmp_path / "*.array_record"),))
    assert texts_of(corpus) == TEXTS + many


def test_a_tfds_folder_is_read_without_tensorflow(tfds_folder):
    assert sorted(texts_of(Tfds(directory=tfds_folder))) == sorted(TEXTS)
    assert "tensorflow" not in sys.modules


def test_bad_patterns_are_refused():
    for patterns in ((), ("",)):
        with pytest.raises(UserError, match="at least one file"):
            TextFiles(patterns=patterns)
    with pytest.raises((UserError, TypeError), match=r"file\.txt"):
        TextFiles(patterns="file.txt")


@pytest.mark.parametrize("kind", [TextFiles, JsonLines, Parquet, ArrayRecords])
def test_a_pattern_without_files_is_named(kind, tmp_path):
    with pytest.raises(UserError, match=r"no file matches '.*nothing\*'"):
        read_corpus(kind(patterns=(str(tmp_path / "nothing*"),)))
    with pytest.raises(UserError, match="a folder: name the files in it"):
        read_corpus(kind(patterns=(str(tmp_path),)))


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read all
    with pytest.raises(UserError, match="cannot read .*a.txt: permission denied"):
        read_corpus(TextFiles(patterns=(str(tmp_path / "a.txt"),)))


def test_a_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="holds no text"):
        texts_of(TextFiles(patterns=(str(tmp_path / "a.txt"),)))
    lines = write_json_lines(tmp_path / "a.jsonl", [{"text": ""}])
    with pytest.raises(UserError, match="holds no text"):
        texts_of(JsonLines(patterns=(lines,)))


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match="a.txt is not UTF-8 text: byte 3 is 0xff"):
        texts_of(TextFiles(patterns=(str(tmp_path / "a.txt"),)))
    write_records(tmp_path / "a.array_record", [b"abc", b"\xff"])
    with pytest.raises(UserError, match="record 2 is not UTF-8"):
        texts_of(ArrayRecords(patterns=(str(tmp_path / "a.array_record"),)))


@pytest.mark.parametrize(
    "line, message",
    [
        ("{'text': 1}", ":2 is not valid JSON"),
        ('{"body": "x", "id": 1}', ":2 has no field 'text'; it has: body, id"),
        ("[1]", ":2 has no field 'text'; it has: list"),
        ('{"text": 3}', ":2: field 'text' must be a string, got int"),
        ('{"text": null}', ":2 has null in 'text', it must hold a string"),
    ],
)
def test_a_bad_json_line_is_named(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"a.jsonl{message}"):
        texts_of(JsonLines(patterns=(str(tmp_path / "a.jsonl"),)))


def test_a_truncated_gzip_file_is_named(tmp_path):
    rng = np.random.default_rng(0)
    packed = gzip.compress(rng.integers(97, 120, 5000).astype(np.uint8).tobytes())
    (tmp_path / "a.txt.gz").write_bytes(packed[:-50])
    with pytest.raises(UserError, match="cannot read .*a.txt.gz"):
        texts_of(TextFiles(patterns=(str(tmp_path / "a.txt.gz"),)))


def test_bad_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("not parquet at all")
    with pytest.raises(UserError, match="a.parquet is not a Parquet file"):
        read_corpus(Parquet(patterns=(str(tmp_path / "a.parquet"),)))
    pq.write_table(pa.table({"n": [1], "body": ["x"]}), tmp_path / "b.parquet")
    pattern = (str(tmp_path / "b.parquet"),)
    with pytest.raises(UserError, match="has no column 'text'; it has: n, body"):
        read_corpus(Parquet(patterns=pattern))
    with pytest.raises(UserError, match="column 'n' must hold strings, it holds int64"):
        read_corpus(Parquet(patterns=pattern, field="n"))


def test_a_damaged_page_of_parquet_is_one_sentence(tmp_path):
    """Arrow says in two lines that it cannot read one."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a text", "another"]}), file)
    data = bytearray(file.read_bytes())
    data[4:20] = bytes(16)  # after the magic, where the first page's header is
    file.write_bytes(data)
    with pytest.raises(UserError, match="cannot read .*a.parquet: ") as refusal:
        list(read_corpus(Parquet(patterns=(str(file),))).documents)
    assert "\n" in str(refusal.value.__cause__) and "\n" not in str(refusal.value)


def test_damaged_array_records_are_named(tmp_path):
    (tmp_path / "junk.array_record").write_text("junk")
    with pytest.raises(
        UserError, match="junk.array_record is an incomplete ArrayRecord"
    ):
        read_corpus(ArrayRecords(patterns=(str(tmp_path / "junk.array_record"),)))
    path = tmp_path / "a.array_record"
    write_records(path, [bytes([97 + i % 26]) * 500 for i in range(100)])
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="a.array_record is damaged"):
        texts_of(ArrayRecords(patterns=(str(path),)))


def test_a_bad_tfds_folder_split_or_field_is_named(tfds_folder, tmp_path):
    with pytest.raises(UserError, match=r"it has no dataset_info\.json"):
        read_corpus(Tfds(directory=str(tmp_path)))
    with pytest.raises(UserError, match="no split 'test'; it has: train"):
        read_corpus(Tfds(directory=tfds_folder, split="test"))
    with pytest.raises(UserError, match="no field 'body'; it has: number, text"):
        read_corpus(Tfds(directory=tfds_folder, field="body"))
    with pytest.raises(UserError, match="record 1 must be text, got int"):
        texts_of(Tfds(directory=tfds_folder, field="number"))


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tfds_folder, tmp_path, monkeypatch
):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'recurjax\[parquet\]'"):
        read_corpus(Parquet(patterns=(str(tmp_path / "a.parquet"),)))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'recurjax\[tfds\]'"):
        read_corpus(Tfds(directory=tfds_folder))


def test_a_prepared_directory_is_no_text(tmp_path):
    with pytest.raises(UserError, match="holds tokens, not text"):
        read_corpus(Prepared(directory=str(tmp_path)))
