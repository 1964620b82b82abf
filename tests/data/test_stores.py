"""Corpora, tokenizers and prepared data in a store; it is fsspec's, in memory."""

import hashlib
import json

import fsspec
import numpy as np
import pytest

from recurjax.cli.data import run
from recurjax.cli.train import with_own_text
from recurjax.data.config import (
    ArrayRecords,
    DataConfig,
    JsonLines,
    Prepared,
    TextFiles,
    TokenizerFile,
)
from recurjax.data.corpora import embedded_text, read_corpus
from recurjax.data.corpus_options import CorpusOptions, _kind
from recurjax.data.dataset import open_dataset
from recurjax.data.tokenizers import load_tokenizer
from recurjax.errors import UserError
from recurjax.files.storage import Store
from tests.training.tiny_experiment import config

ROOT = "memory://bucket/data"
TEXTS = [embedded_text()[:5000], embedded_text()[5000:9000]]


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """An empty store and an empty cache."""
    monkeypatch.setenv("RECURJAX_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    for name, text in zip("ab", TEXTS, strict=True):
        system.pipe_file(f"{ROOT}/texts/{name}.txt", text.encode())
        row = json.dumps({"text": text}) + "\n"
        system.pipe_file(f"{ROOT}/rows/{name}.jsonl", row.encode())
    yield system
    system.store.clear()


@pytest.fixture
def fetched(monkeypatch):
    """Lists what is fetched from then on."""
    names, real = [], Store.fetch

    def fetch(store, name, file):
        names.append(f"{store.url}/{name}".rstrip("/").rpartition("/")[2])
        real(store, name, file)

    monkeypatch.setattr(Store, "fetch", fetch)
    return names


def texts_of(corpus):
    return [document.text for document in read_corpus(corpus).documents]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((f"{ROOT}/texts/*.txt",), TextFiles),
        ((f"{ROOT}/texts",), TextFiles),
        ((f"{ROOT}/texts/a.txt", f"{ROOT}/texts/b.txt"), TextFiles),
        ((f"{ROOT}/**/*.jsonl",), JsonLines),
        ((f"{ROOT}/rows",), JsonLines),
    ],
)
def test_a_corpus_in_a_store_is_read_and_fetched_once(words, kind, fetched):
    corpus = CorpusOptions(corpus=words).corpus_config()
    assert isinstance(corpus, kind) and texts_of(corpus) == TEXTS
    assert len(fetched) == 2
    assert texts_of(corpus) == TEXTS and len(fetched) == 2


def test_a_folder_may_be_named_as_a_file(memory, tmp_path):
    """Spark writes a folder wiki.jsonl with a file for each of its parts."""
    for number, text in enumerate(TEXTS):
        row = json.dumps({"text": text}) + "\n"
        name = f"wiki.jsonl/part-{number}.jsonl"
        memory.pipe_file(f"{ROOT}/{name}", row.encode())
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(row)
    for word in (f"{ROOT}/wiki.jsonl", str(tmp_path / "wiki.jsonl")):
        corpus = CorpusOptions(corpus=(word,)).corpus_config()
        assert corpus == JsonLines(patterns=(f"{word}/**/*.jsonl",))
        assert texts_of(corpus) == TEXTS


def test_an_object_named_is_read_by_who_may_not_list(memory, monkeypatch):
    def denied(_):
        raise UserError("403")

    monkeypatch.setattr(Store, "sizes", denied)
    assert (
        texts_of(CorpusOptions(corpus=(f"{ROOT}/texts/a.txt",)).corpus_config())
        == TEXTS[:1]
    )


def test_an_object_that_was_replaced_is_fetched_again(memory, fetched):
    corpus = TextFiles(patterns=(f"{ROOT}/texts/a.txt",))
    assert texts_of(corpus) == TEXTS[:1]
    memory.pipe_file(f"{ROOT}/texts/a.txt", b"other")
    assert texts_of(corpus) == ["other"] and len(fetched) == 2


def test_what_is_not_there_or_is_no_store_is_one_sentence():
    for patterns, said in (
        ((f"{ROOT}/none/*.txt",), "no file matches"),
        ((f"{ROOT}/none.txt",), "no file matches"),
        (("ftp://host/a.txt",), "nothing can be read at ftp://, only at gs://"),
    ):
        with pytest.raises(UserError, match=said):
            texts_of(TextFiles(patterns=patterns))
    with pytest.raises(UserError, match="no tokenizer at memory://bucket/none"):
        load_tokenizer("memory://bucket/none")
    with pytest.raises(UserError, match="is not a prepared directory: manifest"):
        open_dataset(
            DataConfig(
                corpus=Prepared(directory=ROOT), tokenizer=TokenizerFile(path=ROOT)
            )
        )
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"{ROOT}/a.arrayrecord", b"nothing of that kind")
    with pytest.raises(UserError, match="a.arrayrecord is an incomplete ArrayRecord"):
        texts_of(ArrayRecords(patterns=(f"{ROOT}/a.arrayrecord",)))


def test_data_is_prepared_into_a_store_read_and_merged_there(
    memory, fetched, tmp_path, capsys
):
    words = ["--corpus", f"{ROOT}/texts/*.txt", "--shard-tokens", "2048"]
    url, here = f"{ROOT}/shards", tmp_path / "here"
    assert run(["prepare", "--out", str(here), *words]) == 0
    assert run(["prepare", "--out", url, *words]) == 0
    assert f'Prepared(directory="{url}")' in capsys.readouterr().out
    names = {p.relative_to(here).as_posix(): p for p in here.rglob("*") if p.is_file()}
    there = memory.find(f"{ROOT}/shards")
    assert {name.partition("/shards/")[2] for name in there} == set(names)
    for name, file in names.items():
        assert memory.cat_file(f"{url}/{name}") == file.read_bytes()
    with pytest.raises(UserError, match=f"{url} exists already"):
        run(["prepare", "--out", url, *words])

    experiment, _ = with_own_text(config(), ["--corpus", url], prog="train")
    fetched.clear()
    dataset = open_dataset(experiment.data)
    assert not [name for name in fetched if name.startswith("tokens")]
    stream = dataset.stream
    [first] = stream.read([(0, 5)])
    assert [n for n in fetched if n.startswith("tokens")] == [
        "tokens-00000.arrayrecord"
    ]
    local = open_dataset(
        DataConfig(
            corpus=Prepared(directory=str(here)),
            tokenizer=TokenizerFile(path=str(here / "tokenizer")),
        )
    )
    assert dataset.fingerprint == local.fingerprint
    for split in ("train", "validation"):
        np.testing.assert_array_equal(dataset.tokens(split), local.tokens(split))
    fetched.clear()
    again = open_dataset(experiment.data)
    np.testing.assert_array_equal(again.tokens("train"), local.tokens("train"))
    # The tokenizer is requested by its own path; shards and index are here.
    assert {name for name in fetched if "token" in name} == {"byte_tokenizer.json"}
    for command in ("verify", "show"):
        assert run([command, url]) == 0

    parts = [f"{ROOT}/part{n}" for n in (1, 2)]
    for n, part in enumerate(parts, 1):
        assert run(["prepare", "--out", part, *words, "--part", f"{n}/2"]) == 0
    assert run(["merge", *parts, "--out", f"{ROOT}/whole"]) == 0
    for name, file in names.items():
        assert memory.cat_file(f"{ROOT}/whole/{name}") == file.read_bytes()


def test_a_shard_that_is_damaged_in_the_store_is_named(memory, tmp_path):
    url = f"{ROOT}/shards"
    words = ["--corpus", f"{ROOT}/texts/*.txt", "--shard-tokens", "2048"]
    assert run(["prepare", "--out", url, *words]) == 0
    name = f"{url}/tokens-00001.arrayrecord"
    data = bytearray(memory.cat_file(name))
    data[100] ^= 1
    memory.pipe_file(name, bytes(data))
    dataset = open_dataset(with_own_text(config(), ["--corpus", url], prog="")[0].data)
    with pytest.raises(UserError, match="tokens-00001.arrayrecord is damaged, because"):
        dataset.tokens("train")
    with pytest.raises(UserError, match="tokens-00001.arrayrecord is damaged, because"):
        run(["verify", url])
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("name", ["tokens-00001.arrayrecord", "documents.npy"])
def test_verify_reads_the_store_and_not_the_copies(memory, name):
    url = f"{ROOT}/shards"
    words = ["--corpus", f"{ROOT}/texts/*.txt", "--shard-tokens", "2048"]
    assert run(["prepare", "--out", url, *words]) == 0
    data = with_own_text(config(), ["--corpus", url], prog="")[0].data
    open_dataset(data).tokens("train")
    open_dataset(data).tokens("validation")
    # All copies are complete now; then damage the originals.
    content = bytearray(memory.cat_file(f"{url}/{name}"))
    content[100] ^= 1
    memory.pipe_file(f"{url}/{name}", bytes(content))
    with pytest.raises(UserError, match=f"{url}/{name} is damaged, because its"):
        run(["verify", url])
    memory.rm_file(f"{url}/{name}")
    with pytest.raises(UserError, match="no such bucket or object"):
        run(["verify", url])


@pytest.mark.parametrize("name", ["tokens-00000.arrayrecord", "documents.npy"])
@pytest.mark.parametrize("harm", [lambda data: data[:100], lambda data: bytes(4096)])
def test_a_copy_that_is_damaged_here_is_fetched_anew(
    memory, fetched, tmp_path, name, harm
):
    url = f"{ROOT}/shards"
    words = ["--corpus", f"{ROOT}/texts/*.txt", "--shard-tokens", "2048"]
    assert run(["prepare", "--out", url, *words]) == 0
    data = with_own_text(config(), ["--corpus", url], prog="")[0].data
    want = open_dataset(data).tokens("train")
    [copy] = (tmp_path / "cache").rglob(name)
    copy.write_bytes(harm(copy.read_bytes()))
    fetched.clear()
    np.testing.assert_array_equal(open_dataset(data).tokens("train"), want)
    assert fetched.count(name) == 1
    np.testing.assert_array_equal(open_dataset(data).tokens("train"), want)
    assert fetched.count(name) == 1


def test_a_shard_that_was_damaged_when_its_checksum_was_made_is_named(memory):
    """Its records cannot be read, though it is what was written down."""
    url = f"{ROOT}/shards"
    words = ["--corpus", f"{ROOT}/texts/*.txt", "--shard-tokens", "2048"]
    assert run(["prepare", "--out", url, *words]) == 0
    name = "tokens-00000.arrayrecord"
    content = bytearray(memory.cat_file(f"{url}/{name}"))
    content[100] ^= 1
    memory.pipe_file(f"{url}/{name}", bytes(content))
    manifest = json.loads(memory.cat_file(f"{url}/manifest.json"))
    del manifest["digest"]
    manifest["shards"][0]["sha256"] = hashlib.sha256(content).hexdigest()
    memory.pipe_file(f"{url}/manifest.json", json.dumps(manifest).encode())
    data = with_own_text(config(), ["--corpus", url], prog="")[0].data
    with pytest.raises(UserError, match=f"shard {url}/{name} is damaged"):
        open_dataset(data).tokens("train")


def test_a_prepared_folder_is_known_by_its_manifest_and_a_damaged_one_refused(tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json"):
        _kind(str(tmp_path))
