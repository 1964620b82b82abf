import json
import subprocess
import sys

import numpy as np
import pytest

from recurjax.data.config import (
    ArrayRecords,
    Bpe,
    Bytes,
    Conversations,
    DataConfig,
    EmbeddedText,
    JsonLines,
    Parquet,
    PromptAnswer,
    TextFiles,
)
from recurjax.data.corpora import embedded_text
from recurjax.data.dataset import open_dataset
from recurjax.data.streams import validation_tokens
from recurjax.data.tokenizers import ByteTokenizer, build_tokenizer
from recurjax.errors import UserError
from tests.test_config_ranges import refused


def embedded(**options) -> DataConfig:
    fields = {"corpus": EmbeddedText(), "tokenizer": Bytes(bos=False), **options}
    return DataConfig(**fields)


@pytest.fixture
def small(tmp_path) -> TextFiles:
    (tmp_path / "a.txt").write_text("thirty characters of this text")
    return TextFiles(patterns=(str(tmp_path / "a.txt"),))


def test_the_last_tenth_of_the_bytes_is_validation():
    data = embedded_text().encode()
    dataset = open_dataset(embedded())
    assert dataset.vocabulary == 256
    assert bytes(dataset.tokens("train").astype(np.uint8)) == data[:-103_646]
    assert bytes(dataset.tokens("validation").astype(np.uint8)) == data[-103_646:]
    assert dataset.counted_bytes("validation") == 103_646
    assert dataset.counted_bytes("train") == len(data) - 103_646


def test_documents_begin_with_bos_and_tokenizers_share_the_cut(tmp_path):
    texts = ["the first document", "the second é", "the third and last document"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(rows)
    corpus = JsonLines(patterns=(str(tmp_path / "a.jsonl"),))
    total = len("".join(texts).encode())
    bpe = build_tokenizer(Bpe(vocabulary=262), corpus, validation_fraction=0.0)
    tokenizers = {"bos": ByteTokenizer(), "plain": ByteTokenizer(bos=False), "bpe": bpe}
    for fraction in (0.0, 0.1, 0.5, 0.7, 1.0):
        split = {}
        for name, tokenizer in tokenizers.items():
            config = embedded(corpus=corpus, validation_fraction=fraction)
            dataset = open_dataset(config, tokenizer=tokenizer)
            split[name] = dataset.counted_bytes("validation")
            joined = np.concatenate(
                [dataset.tokens("train"), dataset.tokens("validation")]
            )
            assert dataset.tokenizer.decode(joined) == "".join(texts)
            if dataset.tokenizer.bos is not None:
                starts = np.flatnonzero(joined == dataset.tokenizer.bos)
                np.testing.assert_array_equal(starts, dataset.stream.starts)
        assert split["bos"] == split["plain"] == int(fraction * total)
        assert 0 <= split["plain"] - split["bpe"] < 12  # within a token


def test_a_document_that_is_all_validation_keeps_its_bos(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "aaaa"}\n{"text": "bbbb"}\n')
    corpus = JsonLines(patterns=(str(tmp_path / "a.jsonl"),))
    dataset = open_dataset(
        embedded(corpus=corpus, tokenizer=Bytes(), validation_fraction=0.5)
    )
    assert dataset.tokens("validation").tolist() == [256, 98, 98, 98, 98]
    validation = dataset.split("validation")
    assert validation.document_starts().tolist() == [5]
    assert validation.document_lengths().tolist() == [5]


def test_a_file_can_be_all_validation(small):
    dataset = open_dataset(embedded(corpus=small, validation_fraction=1.0))
    [batch] = dataset.loader("validation", length=64, batch=2)
    assert bytes(batch["ids"][0, :29].astype(np.uint8)).decode().startswith("thirty")
    with pytest.raises(UserError, match="the train split has 0 tokens"):
        dataset.loader("train", length=8, batch=1)


def test_a_given_tokenizer_takes_the_place_of_the_configured_one(small):
    dataset = open_dataset(embedded(corpus=small), tokenizer=ByteTokenizer())
    assert dataset.vocabulary == 257
    assert dataset.tokens("train")[0] == 256


def test_opening_twice_gives_the_same_fingerprint(small, tmp_path):
    first = open_dataset(embedded(corpus=small)).fingerprint
    assert open_dataset(embedded(corpus=small)).fingerprint == first
    (tmp_path / "a.txt").write_text("thirty characters of this tex!")
    assert open_dataset(embedded(corpus=small)).fingerprint != first


def test_a_split_shorter_than_a_row_is_refused(small):
    dataset = open_dataset(embedded(corpus=small))
    with pytest.raises(UserError, match="train split has 27 tokens and .* needs 28"):
        dataset.loader("train", length=27, batch=1)
    dataset.loader("train", length=26, batch=1)
    none = open_dataset(embedded(corpus=small, validation_fraction=0.0))
    with pytest.raises(UserError, match="validation split has 0 tokens"):
        none.loader("validation", length=4, batch=1)


def test_best_fit_needs_bos_and_documents(small):
    plain = open_dataset(embedded(corpus=small, packing="best_fit"))
    with pytest.raises(UserError, match="needs a tokenizer with BOS"):
        plain.loader("train", length=8, batch=1)
    one = open_dataset(embedded(corpus=small, packing="best_fit", tokenizer=Bytes()))
    with pytest.raises(UserError, match="in the train split, which has 1: use"):
        one.loader("train", length=8, batch=1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"packing": "worst_fit"}, "worst_fit"),
        (
            {"validation_fraction": 1.5},
            r"DataConfig\.validation_fraction: must be >= 0 and <= 1, got 1.5",
        ),
        ({"seed": -1}, r"DataConfig\.seed: must be >= 0 and < 2\^32, got -1"),
        (
            {"packing_buffer": 0},
            r"DataConfig\.packing_buffer: must be >= 1 and <= 2\^24, got 0",
        ),
        ({"prefetch": -1}, r"DataConfig\.prefetch: must be >= 0 and <= 1024, got -1"),
        ({"threads": 0}, r"DataConfig\.threads: must be >= 1 and <= 1024, got 0"),
    ],
)
def test_a_bad_config_is_refused(options, message):
    with pytest.raises((UserError, TypeError), match=message):
        embedded(**options)


def test_configs_import_neither_grain_nor_optional_packages():
    code = (
        "import sys, recurjax.data; names = {m.split('.')[0] for m in sys.modules}; "
        "print(names & {'grain', 'tensorflow_datasets', 'pyarrow', 'matplotlib'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_opening_text_imports_no_optional_package():
    code = (
        "import sys; from recurjax.data.dataset import open_dataset; "
        "from recurjax.data import *; "
        "open_dataset(DataConfig(corpus=EmbeddedText(), tokenizer=Bytes())); "
        "names = {m.split('.')[0] for m in sys.modules}; "
        "print(names & {'tensorflow_datasets', 'tensorflow', 'pyarrow', 'torch'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "corpus", [TextFiles, JsonLines, Parquet, ArrayRecords, PromptAnswer, Conversations]
)
@pytest.mark.parametrize("patterns", [(), ("a", ""), "a.txt"])
def test_a_corpus_of_files_names_some(corpus, patterns):
    refused(corpus, "patterns", patterns, "patterns must name at least one file")


@pytest.mark.parametrize("wanted, tokens", [(0, 0), (1, 1), (2, 3), (3, 4), (9, 4)])
def test_a_split_has_the_last_tokens_of_at_most_so_many_bytes(wanted, tokens):
    """BOS before the first counts with them: b, then a and its BOS, then x."""
    tokenizer = ByteTokenizer(bos=True)
    x, a, b = (tokenizer.encode(letter)[-1] for letter in "xab")
    ids = np.array([x, tokenizer.bos, a, b], np.int32)
    assert validation_tokens(ids, tokenizer, wanted) == tokens
