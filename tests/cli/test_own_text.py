"""`recurjax train --corpus FILES`: one's own text in an experiment's place."""

import dataclasses
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from recurjax.cli.data import run as data
from recurjax.cli.options import override
from recurjax.cli.train import with_own_text
from recurjax.data.config import (
    ArrayRecords,
    Bpe,
    Bytes,
    JsonLines,
    Parquet,
    Prepared,
    TextFiles,
    TokenizerFile,
)
from recurjax.data.corpora import embedded_text, read_corpus
from recurjax.data.tasks import Copy, TaskData
from recurjax.errors import UserError
from recurjax.experiment import read_experiment
from tests.cli.commands import TINY, assert_refused, recurjax
from tests.training.tiny_experiment import config

TEXTS = [embedded_text()[:3000], embedded_text()[3000:9000]]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The same two documents in every format, each with a folder of its own."""
    root = tmp_path_factory.mktemp("texts")
    for name in ("text/below", "lines", "tables", "records", "mixed", "none"):
        (root / name).mkdir(parents=True)
    (root / "text/a.md").write_text(TEXTS[0])
    (root / "text/below/b.txt").write_text(TEXTS[1])
    (root / "text/.hidden.jsonl").write_text("no JSON")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (root / "lines/a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    pq.write_table(pa.table({"text": TEXTS}), root / "tables/a.parquet")
    writer = ArrayRecordWriter(str(root / "records/a.arrayrecord"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    (root / "mixed/a.txt").write_text("a")
    (root / "mixed/b.jsonl").write_text("{}")
    (root / "none/a.bin").write_text("a")
    return root


def changed(*words, of=None):
    experiment, left = with_own_text(of or config(), [str(w) for w in words], prog="t")
    return override(experiment, left, prog="t")


@pytest.mark.parametrize(
    "folder, corpus",
    [
        ("text", lambda at: TextFiles(patterns=(f"{at}/**/*.md", f"{at}/**/*.txt"))),
        ("lines", lambda at: JsonLines(patterns=(f"{at}/**/*.jsonl.gz",))),
        ("tables", lambda at: Parquet(patterns=(f"{at}/**/*.parquet",))),
        ("records", lambda at: ArrayRecords(patterns=(f"{at}/**/*.arrayrecord",))),
    ],
)
def test_a_folder_of_each_format_is_a_corpus(texts, folder, corpus):
    experiment = changed("--corpus", texts / folder)
    assert isinstance(experiment.data.corpus, type(corpus("")))
    assert experiment.data.corpus == corpus(texts / folder)
    assert [d.text for d in read_corpus(experiment.data.corpus).documents] == TEXTS
    assert experiment.name == f"tiny_{folder}"
    assert (experiment.data.tokenizer, experiment.model) == (Bytes(), config().model)


def test_the_vocabulary_and_the_name_follow_the_tokenizer(texts):
    file = texts / "text/a.md"
    experiment = changed("--corpus", file, "--tokenizer", "bpe:300")
    assert experiment.data.tokenizer == Bpe(vocabulary=300)
    assert (experiment.model.vocabulary, experiment.name) == (300, "tiny_a_bpe300")
    named = changed("--tokenizer=bytes-without-bos", "--name", "mine")
    assert (named.name, named.model.vocabulary) == ("mine", 256)
    assert named.data.corpus == config().data.corpus
    # Dotted names reach the fields of the corpus that is now there.
    words = ("--corpus", file, "--data.corpus.separator", "\n\n")
    assert changed(*words).data.corpus.separator == "\n\n"


def test_a_prepared_folder_brings_its_tokenizer(texts, tmp_path):
    out = tmp_path / "shards"
    words = ["--corpus", str(texts / "text"), "--tokenizer", "bpe:300"]
    assert data(["prepare", "--out", str(out), *words]) == 0
    held_out = dataclasses.replace(config().data, validation_fraction=0.2)
    experiment = changed(
        "--corpus", out, of=dataclasses.replace(config(), data=held_out)
    )
    assert experiment.data.corpus == Prepared(directory=str(out))
    assert experiment.data.tokenizer == TokenizerFile(path=str(out / "tokenizer"))
    assert experiment.data.validation_fraction is None
    assert (experiment.model.vocabulary, experiment.name) == (300, "tiny_shards")
    with pytest.raises(UserError, match="cannot replace the tokenizer of a prepared"):
        changed("--corpus", out, "--tokenizer", "bytes")
    with pytest.raises(UserError, match="is prepared already: name the text"):
        data(["prepare", "--out", str(tmp_path / "two"), "--corpus", str(out)])


@pytest.mark.slow
def test_a_run_on_ones_own_text_needs_no_python(texts, tmp_path, quick_compilation):
    words = ("--corpus", texts / "lines", "--tokenizer", "bpe:300", "--runs", tmp_path)
    stop = ("--training.steps", 3, "--schedule.warmup-steps", 1)
    for _ in range(2):  # the same command resumes it, which here finds it finished
        answer = recurjax("train", TINY, *words, *stop)
        assert answer[0] == 0, answer
    config_file = tmp_path / "tiny_lines_bpe300" / "config.json"
    experiment = read_experiment(config_file)
    assert experiment.model.vocabulary == 300
    assert experiment.data.corpus == JsonLines(
        patterns=(f"{texts}/lines/**/*.jsonl.gz",)
    )


REFUSED = [
    (("--corpus", "{}/mixed"), "the corpus mixes jsonl and text"),
    (("--corpus", "{}/none"), "is a folder without a file that ends in .txt, "),
    (("--corpus", "{}/a.txt", "--tokenizer", "bpe"), "needs a vocabulary size"),
    (("--corpus", "gs//a.txt", "--tokenizer", "no.json"), "no tokenizer at no.json"),
    (("--corpus", "gopher://a/b.txt"), "nothing can be read at gopher://, only"),
    (("--field", "body"), "describe --corpus FILES, which is missing"),
    (("--bos", "<s>"), "name tokens of --tokenizer, which is missing"),
    (
        ("--corpus", "{}/lines", "--separator", "x"),
        "--separator splits text files only",
    ),
    (
        ("--data.corpus", "my.txt"),
        "--data.corpus: data.corpus is EmbeddedText here, one of EmbeddedText, "
        "TextFiles, .*; --corpus FILES puts your own text in its place",
    ),
    (
        ("--data.corpus.patterns", "my.txt"),
        r"which has no field patterns \(TextFiles, JsonLines, Parquet, ArrayRecords, "
        r"PromptAnswer, Conversations would\): the experiment's file chooses",
    ),
    (
        ("--data.tokenizer=bpe:300",),
        "--data.tokenizer: .* is Bytes here, one of Bytes, Bpe, .*; --tokenizer bpe:",
    ),
    (("--data.corpus.patternz", "x"), "no option --data.corpus.patternz: "),
    (("--schedule", "x"), "schedule is Cosine here, one of "),
]


@pytest.mark.parametrize("words, message", REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_one_sentence(texts, words, message):
    words = [word.format(texts) for word in words]
    assert_refused(recurjax("train", TINY, *words), message)


def test_a_task_takes_no_text():
    task = TaskData(task=Copy())
    experiment = dataclasses.replace(config(), data=task)
    with pytest.raises(UserError, match="tiny is trained on a task"):
        changed("--corpus", "my.txt", of=experiment)
