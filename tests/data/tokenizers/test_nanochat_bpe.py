"""nanochat's tokenizer: merges, encodings and byte counts of the golden cases."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import models

from recurjax.data.config import NanochatBpe, TextFiles
from recurjax.data.corpora import CorpusReading, Document, embedded_text
from recurjax.data.tokenizers import build_tokenizer, load_tokenizer
from recurjax.data.tokenizers.json_tokenizer import byte_characters
from recurjax.data.tokenizers.nanochat_bpe import (
    PATTERN,
    SPECIAL_TOKENS,
    nanochat_tokenizer,
    train_nanochat_bpe,
)
from recurjax.errors import UserError
from tests.golden.cases import golden_cases

CASES = golden_cases("latent_recurrent_transformer/tokenizer_case*.json")
WORDS = json.loads((Path(__file__).parent / "paper_words.json").read_text())
"""How often each match of the split pattern occurs in the text of the golden case: all
that merges depend on, and not the text."""


def reading_of(texts: list[str]) -> CorpusReading:
    ends = np.cumsum([len(text.encode()) for text in texts]).tolist()
    documents = [Document(text, end) for text, end in zip(texts, ends, strict=True)]
    return CorpusReading(total=ends[-1], documents=iter(documents))


def spelt(token: bytes) -> str:
    return "".join(byte_characters()[value] for value in token)


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that a merge joins: what earlier merges leave of its bytes."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        pairs = [a + b for a, b in zip(parts, parts[1:], strict=False)]
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        at = pairs.index(best)
        parts[at : at + 2] = [best]
    return parts[0], parts[1]


def ranks_of(case) -> dict[bytes, int]:
    return {bytes.fromhex(token): rank for token, rank in case["ranks_hex"].items()}


def assert_is_the_case(tokenizer, case):
    assert tokenizer.vocabulary == case["vocab_size"]
    assert tokenizer.bos == case["bos"]
    np.testing.assert_array_equal(tokenizer.token_bytes, case["token_bytes"])
    for text, want in zip(case["samples"], case["encoded_with_bos"], strict=True):
        assert [tokenizer.bos, *tokenizer.encode(text).tolist()] == want
        assert tokenizer.decode(want) == text


@pytest.mark.parametrize("path", CASES)
def test_given_ranks_encode_as_nanochat_does(path):
    case = json.loads(path.read_text())
    assert case["pattern"] == PATTERN and tuple(case["special"]) == SPECIAL_TOKENS
    ranks = ranks_of(case)
    merges = [
        tuple(map(spelt, halves(token, ranks)))
        for token in sorted(ranks, key=lambda token: ranks[token])[256:]
    ]
    vocabulary = {spelt(token): rank for token, rank in ranks.items()}
    model = models.BPE(vocab=vocabulary, merges=merges)
    assert_is_the_case(nanochat_tokenizer(model), case)


@pytest.mark.parametrize("path", CASES)
def test_training_finds_nanochats_merges(path):
    case = json.loads(path.read_text())
    if case["n_docs"] != 142:
        pytest.skip(f"{path.name} is of another text than paper_words.json")
    words = [word for word, count in WORDS.items() for _ in range(count)]
    config = NanochatBpe(vocabulary=case["vocab_size"])
    tokenizer = train_nanochat_bpe(reading_of(words), config)
    learnt = {token: rank for rank, token in enumerate(tokenizer._pieces) if token}
    assert learnt == ranks_of(case)
    assert_is_the_case(tokenizer, case)


def test_merges_of_equal_count_go_by_byte():
    """A blank, byte 32, comes before letters, though GPT-2's alphabet has it last."""
    texts = ["az", " b", "yb"]
    tokenizer = train_nanochat_bpe(reading_of(texts), NanochatBpe(vocabulary=268))
    assert tokenizer._pieces[256:259] == [b" b", b"az", b"yb"]


def test_merges_are_the_most_frequent_pairs_of_what_is_left():
    texts = [embedded_text()[start : start + 10_000] for start in (0, 10_000)]
    tokenizer = train_nanochat_bpe(reading_of(texts), NanochatBpe(vocabulary=289))
    splitter = tokenizer._tokenizer.pre_tokenizer
    split = [word for text in texts for word in splitter.pre_tokenize_str(text)]
    number = {character: value for value, character in enumerate(byte_characters())}
    words = Counter(tuple(number[c] for c in word) for word, _ in split)
    pieces = [bytes([value]) for value in range(256)]
    for token in range(256, 280):
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        pieces.append(pieces[best[0]] + pieces[best[1]])
        assert tokenizer._pieces[token] == pieces[token]
        merged = Counter()
        for word, count in words.items():
            merged[_joined(word, best, token)] += count
        words = merged


def _joined(word, pair, token):
    out = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] = token
        else:
            out.append(part)
    return tuple(out)


def test_merges_are_counted_on_the_first_ten_thousand_characters_of_a_document():
    config = NanochatBpe(vocabulary=269)
    texts = ["ab " * 3_333 + "|" + "yz " * 50_000, "cd " * 2_000]
    tokenizer = train_nanochat_bpe(reading_of(texts), config)
    assert tokenizer._pieces[256:260] == [b"ab", b" ab", b"cd", b" cd"]


def test_it_is_built_from_a_config_and_saved(tmp_path):
    (tmp_path / "a.txt").write_text(embedded_text()[:30_000])
    corpus = TextFiles(patterns=(str(tmp_path / "a.txt"),))
    config = NanochatBpe(vocabulary=400)
    tokenizer = build_tokenizer(config, corpus, validation_fraction=0.1)
    assert (tokenizer.vocabulary, tokenizer.bos, tokenizer.eos) == (400, 391, 391)
    tokenizer.save(tmp_path / "there")
    assert load_tokenizer(tmp_path / "there").hash == tokenizer.hash
    with pytest.raises(UserError, match="yields only 2.. BPE tokens and .* for 400"):
        train_nanochat_bpe(reading_of(["too little text"]), config)


def test_sizes_that_hold_no_bytes_are_refused():
    with pytest.raises(UserError, match=r"NanochatBpe\.vocabulary: must be >= 265"):
        NanochatBpe(vocabulary=264)
    with pytest.raises(
        UserError, match=r"NanochatBpe\.train_bytes: must be >= 1 and < 2\^63"
    ):
        NanochatBpe(vocabulary=265, train_bytes=0)
