import fcntl
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from array_record.python import array_record_module
from rich.console import Console

from recurjax.data.config import (
    Bpe,
    Bytes,
    DataConfig,
    JsonLines,
    Prepared,
    TokenizerFile,
)
from recurjax.data.corpora import embedded_text
from recurjax.data.dataset import open_dataset
from recurjax.data.prepared import (
    PreparedStream,
    merge,
    prepare,
    read_manifest,
    shown_progress,
    verify_checksums,
)
from recurjax.data.prepared.writing import Progress
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> JsonLines:
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    texts = embedded_text()[:40_000].split("\n\n")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return JsonLines(patterns=(str(path),))


@pytest.fixture(scope="module")
def original(corpus, tmp_path_factory) -> Path:
    """40 thousand tokens in three shards."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    prepare(corpus, ByteTokenizer(), out, shard_tokens=16_000)
    return out


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "data"))


def opened(folder: Path, **options):
    fields = {
        "corpus": Prepared(directory=str(folder)),
        "tokenizer": TokenizerFile(path=str(folder / "tokenizer")),
        **options,
    }
    return open_dataset(DataConfig(**fields))


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrayrecord"))


def test_prepared_data_gives_the_batches_of_the_corpus(corpus, original):
    assert len(shards_of(original)) == 3
    for packing in ("concat", "best_fit"):
        options = {"packing": packing, "document_segments": True, "packing_buffer": 50}
        memory = open_dataset(DataConfig(corpus=corpus, tokenizer=Bytes(), **options))
        disk = opened(original, **options)
        assert (disk.cut, disk.stream.tokens) == (memory.cut, memory.stream.tokens)
        np.testing.assert_array_equal(disk.stream.starts, memory.stream.starts)
        for split in ("train", "validation"):
            np.testing.assert_array_equal(disk.tokens(split), memory.tokens(split))
            a = iter(disk.loader(split, length=48, batch=4))
            b = iter(memory.loader(split, length=48, batch=4))
            for _ in range(5):
                got, want = next(a), next(b)
                for name in want:
                    np.testing.assert_array_equal(got[name], want[name])


def test_any_span_of_tokens_can_be_read(original):
    stream = PreparedStream(original, read_manifest(original))
    [whole] = stream.read([(0, stream.tokens)])
    assert len(whole) == stream.tokens > 30_000
    rng = np.random.default_rng(0)
    spans = [
        tuple(sorted(rng.integers(0, stream.tokens, 2).tolist())) for _ in range(20)
    ]
    spans += [(5, 5), (stream.tokens, stream.tokens), (1023, 1025), (1024, 2048)]
    for (start, stop), got in zip(spans, stream.read(spans), strict=True):
        np.testing.assert_array_equal(got, whole[start:stop])


def test_the_manifest_counts_what_was_written(corpus, original):
    manifest = read_manifest(original)
    texts = [json.loads(line)["text"] for line in open_lines(corpus)]
    texts = [text for text in texts if text]
    assert manifest.documents == len(texts)
    assert manifest.text_bytes == sum(len(text.encode()) for text in texts)
    assert manifest.tokens == manifest.text_bytes + manifest.documents
    assert manifest.train_tokens + manifest.validation_tokens == manifest.tokens
    assert manifest.tokenizer_hash == ByteTokenizer().hash
    assert manifest.dtype == "uint16" and manifest.vocabulary == 257
    verify_checksums(original)


def open_lines(corpus: JsonLines) -> list[str]:
    return Path(corpus.patterns[0]).read_text().splitlines()


def test_large_vocabularies_are_stored_in_four_bytes(corpus, tmp_path):
    class Wide(ByteTokenizer):
        def __init__(self):
            super().__init__()
            self.vocabulary = 70_000
            self.token_bytes = np.ones(70_000, np.int32)

        def encode_many(self, texts):
            return [ids + 69_000 for ids in super().encode_many(texts)]

    manifest = prepare(corpus, Wide(), tmp_path / "wide")
    assert manifest.dtype == "uint32"
    [ids] = PreparedStream(tmp_path / "wide", manifest).read([(1, 6)])
    assert ids.min() >= 69_000


def test_prepare_twice_writes_the_same_tokens(corpus, original, tmp_path):
    again = prepare(corpus, ByteTokenizer(), tmp_path / "again", shard_tokens=16_000)
    assert again == read_manifest(original)


def test_prepare_overwrites_nothing(corpus, tmp_path):
    (tmp_path / "there").mkdir()
    prepare(corpus, ByteTokenizer(), tmp_path / "there")  # an empty folder is free
    with pytest.raises(UserError, match="there exists already"):
        prepare(corpus, ByteTokenizer(), tmp_path / "there")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file exists already"):
        prepare(corpus, ByteTokenizer(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failure_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 10 + "broken\n")
    out = tmp_path / "deep" / "out"
    with pytest.raises(UserError, match=":11 is not valid JSON"):
        prepare(JsonLines(patterns=(str(path),)), ByteTokenizer(), out)
    assert list(out.parent.iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(corpus, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, ByteTokenizer(), tmp_path / "out", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing_behind(corpus, tmp_path, monkeypatch):
    writer = array_record_module.ArrayRecordWriter

    def full(path, options):
        return writer("/dev/full", options)

    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", full)
    with pytest.raises(UserError, match="the disk is full and nothing"):
        prepare(corpus, ByteTokenizer(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        prepare(corpus, ByteTokenizer(), tmp_path / "file" / "out")


def test_bad_numbers_are_refused(corpus, tmp_path):
    for options in ({"validation_fraction": -0.1}, {"shard_tokens": 0}):
        with pytest.raises(UserError, match=next(iter(options))):
            prepare(corpus, ByteTokenizer(), tmp_path / "out", **options)


def test_a_missing_or_damaged_manifest_is_named(folder, tmp_path):
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        opened(tmp_path / "nowhere")
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    for damaged in (text[:100], "[]", text.replace('"tokens"', '"token"')):
        manifest.write_text(damaged)
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            opened(folder)
    manifest.write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(UserError, match="has format 9 and this version reads 1"):
        opened(folder)


@pytest.mark.parametrize("name", ["../tokens-00000.arrayrecord", "/etc/passwd", 3])
def test_a_manifest_cannot_name_a_file_outside_the_folder(folder, name):
    manifest = folder / "manifest.json"
    values = json.loads(manifest.read_text())
    values["shards"][0]["file"] = name
    del values["digest"]  # Whoever forges a manifest can forge its digest too.
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"the plain name of a file in|file is 3"):
        opened(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", "9", ""),
        ("block", 0, ".*block 0"),
        ("dtype", "object", "dtype 'object'"),
        ("shards", [], "it names no shards"),
        ("tokens", -1, ""),
        ("tokens", 2**63, "tokens is 9223372036854775808"),
    ],
)
def test_a_manifest_with_wrong_values_is_named(folder, field, value, message):
    manifest = folder / "manifest.json"
    values = json.loads(manifest.read_text()) | {field: value}
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match=rf"manifest\.json is damaged \({message}"):
        opened(folder)


def test_a_manifest_that_was_changed_is_told_and_one_without_a_digest_is_read(folder):
    file = folder / "manifest.json"
    text = file.read_text()
    number = json.loads(text)["train_tokens"]
    file.write_text(text.replace(f'"train_tokens": {number}', '"train_tokens": 7'))
    with pytest.raises(
        UserError, match="manifest.json is damaged .its digest does not"
    ):
        read_manifest(folder)
    values = json.loads(text)
    del values["digest"]
    file.write_text(json.dumps(values))
    assert read_manifest(folder).train_tokens == number


def test_shards_in_each_others_place_are_found_by_their_checksums(folder):
    one, two = shards_of(folder)[:2]
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    with pytest.raises(UserError, match="tokens-00000.* is damaged"):
        verify_checksums(folder)


def test_a_truncated_or_missing_shard_is_named(folder):
    shard = shards_of(folder)[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1000])
    with pytest.raises(UserError, match="tokens-00001.* bytes and the manifest says"):
        opened(folder)
    shard.unlink()
    with pytest.raises(UserError, match="tokens-00001.* is missing"):
        opened(folder)
    with pytest.raises(UserError, match="tokens-00001.* is missing"):
        verify_checksums(folder)


def test_a_shard_with_an_unreadable_end_is_named(folder):
    shard = shards_of(folder)[0]
    data = bytearray(shard.read_bytes())
    data[-65536:] = bytes(65536)
    shard.write_bytes(data)
    with pytest.raises(UserError, match="the shards in .* are damaged"):
        opened(folder)


def test_a_flipped_bit_is_found_when_it_is_read(folder):
    shard = shards_of(folder)[1]
    data = bytearray(shard.read_bytes())
    data[2000] ^= 4
    shard.write_bytes(data)
    with pytest.raises(UserError, match="tokens-00001.* is damaged"):
        verify_checksums(folder)
    dataset = opened(folder)
    with pytest.raises(UserError, match="tokens-00001.* is damaged"):
        dataset.tokens("train")
    with pytest.raises(UserError, match="tokens-00001.* is damaged"):
        for _ in zip(
            range(500), dataset.loader("train", length=64, batch=8), strict=False
        ):
            pass


def test_a_damaged_or_missing_index_is_named(folder):
    index = folder / "documents.npy"
    data = bytearray(index.read_bytes())
    data[-1] ^= 1
    index.write_bytes(data)
    with pytest.raises(UserError, match=r"documents\.npy is damaged"):
        opened(folder)
    index.unlink()
    with pytest.raises(UserError, match=r"documents\.npy is missing"):
        opened(folder)


def test_another_tokenizer_than_the_prepared_one_is_refused(original):
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        opened(original, tokenizer=Bytes(bos=False))
    with pytest.raises(UserError, match="so Bpe cannot be trained"):
        opened(original, tokenizer=Bpe(vocabulary=300))
    assert opened(original, tokenizer=Bytes()).vocabulary == 257


def test_another_split_than_the_prepared_one_is_refused(original):
    with pytest.raises(UserError, match="with validation_fraction 0.1, .* 0.2"):
        opened(original, validation_fraction=0.2)


def test_a_prepared_corpus_brings_its_own_split(original, corpus, tmp_path):
    prepare(corpus, ByteTokenizer(), tmp_path / "half", validation_fraction=0.5)
    for folder, fraction in ((original, 0.1), (tmp_path / "half", 0.5)):
        dataset = opened(folder, validation_fraction=None)
        manifest = read_manifest(folder)
        assert manifest.validation_fraction == fraction
        assert dataset.split("train").tokens == manifest.train_tokens


def test_a_place_in_the_data_survives_a_move_of_the_directory(original, folder):
    first = iter(opened(original).loader("train", length=32, batch=4))
    next(first)
    second = iter(opened(folder).loader("train", length=32, batch=4))
    second.set_state(first.get_state())
    np.testing.assert_array_equal(next(second)["ids"], next(first)["ids"])
    manifest = read_manifest(folder)
    changed = replace(manifest, train_tokens=manifest.train_tokens - 1)
    (folder / "manifest.json").write_text(changed.to_json())
    third = iter(opened(folder).loader("train", length=32, batch=4))
    with pytest.raises(UserError, match="was saved with data"):
        third.set_state(first.get_state())


def test_progress_reaches_the_end_and_is_plain_off_a_terminal(corpus, tmp_path):
    seen, written = [], io.StringIO()
    with shown_progress(Console(file=written, width=200)) as show:

        def progress(now):
            seen.append(now)
            show(now)

        manifest = prepare(corpus, ByteTokenizer(), tmp_path / "out", progress=progress)
    assert seen[-1].done == seen[-1].total
    assert seen[-1].tokens == manifest.tokens
    assert seen[-1].documents == manifest.documents
    [line] = written.getvalue().splitlines()
    assert line.startswith("tokenizing 100%") and "\x1b" not in line


def test_off_a_terminal_documents_after_the_last_byte_was_read_write_no_lines():
    """A reader is at its end long before the last of its documents is encoded."""
    written = io.StringIO()
    with shown_progress(Console(file=written, width=200)) as show:
        for documents in range(1, 1001):
            show(Progress(done=7, total=7, documents=documents, tokens=documents))
    [line] = written.getvalue().splitlines()
    assert "1,000 documents" in line


def test_it_stops_after_the_document_that_reaches_max_tokens(corpus, tmp_path):
    seen = []
    whole = prepare(corpus, ByteTokenizer(), tmp_path / "whole")
    stream = PreparedStream(tmp_path / "whole", whole)
    ends = [*stream.starts[1:].tolist(), stream.tokens]
    for most in (ends[9] - 1, ends[9]):
        out = tmp_path / str(most)
        result = prepare(
            corpus, ByteTokenizer(), out, max_tokens=most, progress=seen.append
        )
        assert (result.documents, result.tokens) == (10, ends[9])
        # A tenth of what was taken, and not of the corpus, is validation.
        assert result.validation_tokens == pytest.approx(result.text_bytes / 10, abs=2)
        assert seen[-1].done == seen[-1].total == most
        [got] = PreparedStream(out, result).read([(0, result.tokens)])
        np.testing.assert_array_equal(got, stream.read([(0, ends[9])])[0])
    more = prepare(
        corpus,
        ByteTokenizer(),
        tmp_path / "more",
        max_tokens=10**6,
        progress=seen.append,
    )
    assert more.tokens == whole.tokens and seen[-1].done == seen[-1].total
    with pytest.raises(UserError, match="max_tokens must be positive, got 0"):
        prepare(corpus, ByteTokenizer(), tmp_path / "none", max_tokens=0)


def test_progress_on_a_terminal_is_a_bar(corpus, tmp_path):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=200)
    with shown_progress(console) as progress:
        prepare(corpus, ByteTokenizer(), tmp_path / "out", progress=progress)
    assert "100%" in written.getvalue() and "tokens/s" in written.getvalue()


def same_files(got: Path, want: Path) -> bool:
    names = {p.relative_to(want): p for p in want.rglob("*") if p.is_file()}
    there = {p.relative_to(got): p for p in got.rglob("*") if p.is_file()}
    return names.keys() == there.keys() and all(
        there[name].read_bytes() == names[name].read_bytes() for name in names
    )


@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_join_to_what_one_process_writes(corpus, original, tmp_path, count):
    parts = [tmp_path / f"part{n}" for n in range(1, count + 1)]
    for number, out in enumerate(parts, 1):
        options = {"part": (number, count), "shard_tokens": 16_000}
        prepare(corpus, ByteTokenizer(), out, **options)
    merge(parts[::-1], tmp_path / "whole")
    assert same_files(tmp_path / "whole", original)


def test_parts_that_do_not_belong_together_are_told(corpus, original, tmp_path):
    def part(number, count, **options):
        out = tmp_path / f"{number}_{count}_{len(list(tmp_path.iterdir()))}"
        prepare(corpus, ByteTokenizer(), out, part=(number, count), **options)
        return out

    one, two = part(1, 2), part(2, 2)
    other, third = part(2, 2, validation_fraction=0.2), part(3, 3)
    for parts, said in (
        ([one], "part 2 of 2 is missing"),
        ([one, one], "are both part 1/2"),
        ([one, other], r"different settings \(validation_fraction\)"),
        ([one, third], r"different settings \(parts\)"),
        ([one, original], "is not a part"),
        ([], "name the parts"),
    ):
        with pytest.raises(UserError, match=said):
            merge(parts, tmp_path / "out")
    shard = next(iter(shards_of(two)))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="is damaged"):
        merge([one, two], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="no document begins in part 2/"):
        part(2, 100_000)


def stop_at(documents):
    """Stops a preparation after a number of documents of this call, as Ctrl-C does."""
    calls = iter(range(1, documents + 1))

    def stop(_):
        if next(calls) == documents:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("options", [{}, {"part": (1, 1)}, {"max_tokens": 30_000}])
def test_what_was_stopped_goes_on_and_is_the_same(corpus, tmp_path, options):
    options = {"shard_tokens": 2048, **options}
    prepare(corpus, ByteTokenizer(), tmp_path / "at_once", **options)
    out, kept, documents = tmp_path / "out", [], []
    for stop in (5, 80, 80, 3, 90):
        with pytest.raises(KeyboardInterrupt):
            progress = stop_at(stop)
            prepare(corpus, ByteTokenizer(), out, progress=progress, **options)
        result = tmp_path / ".out.partial" / "progress.json"
        kept.append(
            json.loads(result.read_text())["documents"] if result.exists() else 0
        )
    assert kept[0] < kept[1] < kept[2] <= kept[3] < kept[4]
    prepare(corpus, ByteTokenizer(), out, progress=documents.append, **options)
    assert documents[0].documents == kept[-1] + 1  # no document was made again
    assert same_files(out, tmp_path / "at_once")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["at_once", "out"]


def test_what_was_stopped_goes_on_only_as_it_was_begun(corpus, tmp_path):
    def begin(out, **options):
        prepare(corpus, ByteTokenizer(), tmp_path / out, shard_tokens=2048, **options)

    with pytest.raises(KeyboardInterrupt):
        begin("out", progress=stop_at(80))
    with pytest.raises(UserError, match=r"other settings \(validation_frac"):
        begin("out", validation_fraction=0.2)
    partial = tmp_path / ".out.partial"
    shard = shards_of(partial)[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(UserError, match=f"{shard.name} is damaged: remo"):
        begin("out")
    shard.write_bytes(data)
    with open(partial / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            UserError, match="another process is already preparing .*out: wait"
        ):
            begin("out")
    (partial / "progress.json").write_text("{")
    with pytest.raises(UserError, match=r"progress.json"):
        begin("out")
