"""Separators of documents: the tokens that `data prepare` writes."""

import json

import numpy as np
import pytest

from recurjax.cli.data import run
from recurjax.data.config import DataConfig, JsonLines, Prepared, TokenizerFile
from recurjax.data.dataset import open_dataset
from recurjax.errors import UserError
from tests.data.tokenizers.tokenizer_files import plain_definition

TEXTS = ("ab", "cde", "f" * 9)
T5, LLAMA = ("</s>",), ("<unk>", "<s>", "</s>")


def definition(folder, specials):
    file = folder / "tokenizer.json"
    file.write_text(plain_definition(*specials))
    return file


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return JsonLines(patterns=(str(file),))


def documents_of(dataset) -> list[str]:
    """Each document with a character for a special token: its number."""
    tokenizer, stream = dataset.tokenizer, dataset.stream
    [ids] = stream.read([(0, stream.tokens)])
    count = tokenizer.vocabulary - 256
    text = [str(i) if i < count else tokenizer.decode([i]) for i in ids.tolist()]
    edges = [*stream.starts.tolist(), stream.tokens]
    pairs = zip(edges, edges[1:], strict=False)
    return ["".join(text[start:stop]) for start, stop in pairs]


@pytest.mark.parametrize(
    "specials, words, before, after, told",
    [
        (T5, (), "", "0", "ends with token 0"),
        (T5, ("--eos", "none"), "", "", "nothing separates the documents"),
        (T5, ("--bos", "</s>"), "0", "", "begins with token 0"),
        # The file names a BOS and puts it nowhere: texts do not begin with it.
        (LLAMA, (), "", "2", "ends with token 2"),
        (LLAMA, ("--bos", "<s>"), "1", "", "begins with token 1"),
        (LLAMA, ("--bos", "none"), "", "2", "ends with token 2"),
        (LLAMA, ("--bos", "</s>"), "2", "", "begins with token 2"),
        (
            *(LLAMA, ("--bos", "<s>", "--eos", "</s>"), "1", "2"),
            "begins with token 1 and ends with",
        ),
    ],
)
def test_documents_are_separated(
    specials, words, before, after, told, corpus, tmp_path, capsys
):
    file, out = definition(tmp_path, specials), tmp_path / "out"
    paths = ("--out", str(out), "--corpus", corpus.patterns[0])
    assert run(["prepare", *paths, "--tokenizer", str(file), *words]) == 0
    assert told in capsys.readouterr().out
    prepared = Prepared(directory=str(out))
    tokenizer = TokenizerFile(path=str(out / "tokenizer"))
    disk = open_dataset(DataConfig(corpus=prepared, tokenizer=tokenizer))
    assert documents_of(disk) == [before + text + after for text in TEXTS]
    # Generation, CORE and best-fit packing go by the saved tokenizer.
    assert disk.tokenizer.bos == (int(before) if before else None)
    assert disk.tokenizer.eos is not None


def test_text_in_memory_is_separated_too(corpus, tmp_path):
    tokenizer = TokenizerFile(path=str(definition(tmp_path, T5)))
    for fraction, validation in ((0.0, 0), (0.5, 7), (0.75, 10), (1.0, 14)):
        dataset = open_dataset(
            DataConfig(corpus=corpus, tokenizer=tokenizer, validation_fraction=fraction)
        )
        assert documents_of(dataset) == [text + "0" for text in TEXTS]
        ids = dataset.tokens("validation")
        assert dataset.counted_bytes("validation") == validation
        # The end of the document before the cut stays with that document.
        assert not len(ids) or ids[0] != 0
        assert np.count_nonzero(ids == 0) == {0: 0, 7: 1, 10: 2, 14: 3}[validation]


def test_tokens_that_cannot_separate_are_refused(corpus, tmp_path):
    paths = ("--out", str(tmp_path / "out"), "--corpus", corpus.patterns[0])
    file = definition(tmp_path, T5)
    for words, message in (
        (("--tokenizer", "bytes", "--bos", "none"), "and bytes defines its own"),
        (("--tokenizer", "bpe:300", "--eos", "</s>"), "and bpe:300 defines its own"),
        (("--tokenizer", str(file), "--bos", "<s>"), "no token '<s>' to use as BOS"),
        (("--max-tokens", "0"), "--max-tokens: must be >= 1, got 0"),
    ):
        with pytest.raises(UserError, match=message):
            run(["prepare", *paths, *words])
