import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from recurjax.data.config import Bpe, Bytes, TextFiles, TokenizerFile
from recurjax.data.corpora import CorpusReading, Document, embedded_text, read_corpus
from recurjax.data.tokenizers import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    build_tokenizer,
    json_tokenizer,
    load_tokenizer,
)
from recurjax.data.tokenizers.bpe import TrainingPart, train_bpe
from recurjax.errors import UserError
from tests.data.tokenizers.tokenizer_files import plain_definition

SAMPLES = [
    "",
    "Hello world! This is a test.",
    "  leading\n\n\tand trailing  \r\n",
    "你好世界 🌍 naïve café",
    "<|bos|> and <|endoftext|> are not special here",
    embedded_text()[:3000],
]


def reading_of(*texts: str) -> CorpusReading:
    ends = np.cumsum([len(text) for text in texts]).tolist()
    documents = [Document(text, end) for text, end in zip(texts, ends, strict=True)]
    return CorpusReading(total=ends[-1], documents=iter(documents))


@pytest.fixture(scope="session")
def bpe() -> JsonTokenizer:
    return train_bpe(reading_of(embedded_text()[:60_000]), Bpe(vocabulary=500))


@pytest.fixture(scope="session")
def sentencepiece() -> JsonTokenizer:
    learner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>"]
    names = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special + names, show_progress=False
    )
    learner.train_from_iterator([embedded_text()[:20_000]], trainer)
    definition = json.loads(learner.to_str())
    added = definition["added_tokens"]
    definition["added_tokens"] = [token for token in added if token["id"] < 3]
    return JsonTokenizer(json.dumps(definition), bos="<s>", eos="</s>")


@pytest.fixture(params=["bytes", "bytes-without-bos", "bpe"])
def tokenizer(request, bpe) -> Tokenizer:
    choices = {
        "bytes": ByteTokenizer(),
        "bytes-without-bos": ByteTokenizer(bos=False),
        "bpe": bpe,
    }
    return choices[request.param]


def test_decoding_undoes_encoding(tokenizer):
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert tokenizer.decode(ids) == text
        assert (ids < tokenizer.vocabulary).all() and tokenizer.bos not in ids


def test_token_bytes_sum_to_the_length_of_the_text(tokenizer):
    assert tokenizer.token_bytes.shape == (tokenizer.vocabulary,)
    assert tokenizer.token_bytes.dtype == np.int32
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert b"".join(tokenizer.bytes_of(int(i)) for i in ids) == text.encode()
    assert tokenizer.bytes_of(tokenizer.vocabulary) == b""
    if tokenizer.bos is not None:
        assert tokenizer.bytes_of(tokenizer.bos) == b""
        assert tokenizer.token_bytes[tokenizer.bos] == 0


def test_many_texts_are_encoded_as_one_by_one(tokenizer):
    for ids, text in zip(tokenizer.encode_many(SAMPLES), SAMPLES, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_streaming_joins_to_the_whole_even_when_bytes_are_not_utf8(
    tokenizer, sentencepiece
):
    rng = np.random.default_rng(0)
    for subject in (tokenizer, sentencepiece):
        drawn = [rng.integers(0, subject.vocabulary, 200) for _ in range(5)]
        for ids in [*drawn, *subject.encode_many(SAMPLES)]:
            stream, pieces, start = subject.stream(), [], 0
            while start < len(ids):
                stop = start + int(rng.integers(1, 4))
                pieces.append(stream.push(ids[start:stop].tolist()))
                start = stop
            assert "".join([*pieces, stream.finish()]) == subject.decode(ids)


def test_streaming_holds_back_an_unfinished_character(tokenizer):
    ids = tokenizer.encode("é").tolist()
    assert len(ids) == 2
    stream = tokenizer.stream()
    assert stream.push(ids[:1]) == ""
    assert stream.push(ids[1:]) == "é"
    assert stream.push(ids[:1]) == "" and stream.finish() == "\ufffd"


def test_a_saved_tokenizer_loads_as_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "there")
    again = load_tokenizer(tmp_path / "there")
    assert (again.hash, again.bos, again.eos) == (
        tokenizer.hash,
        tokenizer.bos,
        tokenizer.eos,
    )
    for text in SAMPLES:
        np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))


def test_the_byte_tokenizer_is_utf8_and_bos():
    with_bos, without = ByteTokenizer(), ByteTokenizer(bos=False)
    assert (with_bos.vocabulary, with_bos.bos) == (257, 256)
    assert (without.vocabulary, without.bos) == (256, None)
    assert with_bos.hash != without.hash
    assert with_bos.encode("é").tolist() == [0xC3, 0xA9]
    assert with_bos.decode([256, 104, 105, 256, 255]) == "hi\ufffd"


def test_a_trained_bpe_has_the_vocabulary_asked_for_and_compresses(bpe):
    assert bpe.vocabulary == 500 and bpe.bos == bpe.eos == 0
    text = embedded_text()[:3000]
    assert len(bpe.encode(text)) < 0.6 * len(text)


def test_the_same_text_trains_the_same_bpe(bpe):
    again = train_bpe(reading_of(embedded_text()[:60_000]), Bpe(vocabulary=500))
    other = train_bpe(reading_of(embedded_text()[:50_000]), Bpe(vocabulary=500))
    assert again.hash == bpe.hash != other.hash


def test_a_bpe_does_not_look_at_the_validation_part():
    seen, kept = "the cat sat on the mat. " * 40, "zyxw " * 48
    config = Bpe(vocabulary=262)
    alone = train_bpe(reading_of(seen), config)
    for texts in ((seen + kept,), (seen[:500], seen[500:], kept[:9], kept[9:])):
        fraction = len(kept) / len(seen + kept)
        got = train_bpe(
            reading_of(*texts), config, part=TrainingPart(share=1.0 - fraction)
        )
        if len(texts) == 1:
            assert got.hash == alone.hash
        assert "zyxw" not in str(json.loads(got._definition)["model"]["merges"])
        assert len(got.encode("zyxw")) == 4
    assert len(train_bpe(reading_of(seen + kept), config).encode(" zyxw")) < 5


def test_a_bpe_counts_merges_on_no_more_text_than_asked():
    texts = ["aaaa bbbb " * 30, "cdcdcdcd " * 30]
    config = Bpe(vocabulary=259, train_bytes=100)
    got = train_bpe(reading_of(*texts), config)
    assert got.hash == train_bpe(reading_of(texts[0]), config).hash


def test_a_bpe_stays_within_the_text_that_will_be_used():
    """A corpus of which 400 bytes are used, 40 of them for validation."""
    texts = ["abab cd " * 25, "abab cd " * 20 + "zyxw" * 10, "zyxw" * 100]
    for cut in (texts, ["".join(texts)]):
        part = TrainingPart(share=0.9, used_bytes=400)
        seen = "".join(part.texts(reading_of(*cut), limit=10_000))
        assert seen == "".join(texts)[:360]


def test_nothing_is_learnt_after_the_document_in_which_validation_begins():
    part = TrainingPart(share=0.55)
    one, many = reading_of("abcdefghij"), reading_of(*["ab", "cde", "fgh", "ij"])
    assert "".join(part.texts(one, limit=99)) == "abcde"
    assert "".join(part.texts(many, limit=99)) == "abcde"
    # Of a packed file many documents end at one place.
    documents = [Document("abcd", 4), Document("ef", 10), Document("ghij", 10)]
    packed = CorpusReading(total=10, documents=iter(documents))
    assert "".join(part.texts(packed, limit=99)) == "abcd"


def test_long_texts_are_cut_where_it_changes_no_token(bpe, monkeypatch):
    text = embedded_text()[:40_000]
    whole = bpe.encode(text)
    monkeypatch.setattr(json_tokenizer, "_PIECE", 100)
    assert len(json_tokenizer._pieces(text)) > 100
    np.testing.assert_array_equal(bpe.encode(text), whole)


def test_a_tokenizer_whose_tokens_cross_lines_is_not_cut(bpe, monkeypatch):
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(["ab\ncd " * 20, "x ab\ncd y"], trainer)
    subject = JsonTokenizer(learner.to_str(), bos=None, eos=None)
    assert "b\nc" in [subject.decode([i]).strip() for i in range(300)] or any(
        b"\n" in piece.strip() for piece in subject._pieces
    )
    whole = subject.encode("ab\ncd " * 100)
    monkeypatch.setattr(json_tokenizer, "_PIECE", 50)
    np.testing.assert_array_equal(subject.encode("ab\ncd " * 100), whole)


def test_sentencepiece_tokens_stand_for_their_bytes(sentencepiece):
    text = " thou art 世"
    ids = sentencepiece.encode(text.strip())
    assert sentencepiece.token_bytes[ids].sum() == len(text.encode())
    assert sentencepiece.decode(ids) == text.strip()
    assert sentencepiece.token_bytes[[sentencepiece.bos, sentencepiece.eos]].sum() == 0


def test_special_tokens_are_found_by_config_then_file_then_name(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(plain_definition("<s>", "</s>", "<|im_start|>"))
    by_name = load_tokenizer(file)
    # Nothing in the file puts BOS before a text, although it has one by name.
    assert (by_name.bos, by_name.eos) == (None, 1)
    assert by_name.names == {"bos_token": "<s>", "eos_token": "</s>"}
    beside = {"bos_token": {"content": "<|im_start|>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    by_file = load_tokenizer(tmp_path)
    assert (by_file.bos, by_file.eos) == (None, None)
    assert by_file.names == {"bos_token": "<|im_start|>", "eos_token": None}
    by_config = load_tokenizer(tmp_path, bos="</s>", eos="<s>")
    assert (by_config.bos, by_config.eos) == (1, 0)
    without = load_tokenizer(tmp_path, bos="none", eos="</s>")
    assert (without.bos, without.eos) == (None, 1)
    without.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.bos, again.eos, again.hash) == (None, 1, without.hash)
    assert len({by_name.hash, by_file.hash, by_config.hash}) == 3


def test_a_folder_of_version_0_1_saves_and_loads_as_the_same(tmp_path):
    # Its BOS begins texts by its name alone; runs and prepared data keep such folders.
    (tmp_path / "tokenizer.json").write_text(plain_definition("<s>", "</s>"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    config = json.dumps(names, indent=1) + "\n"
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos, tokenizer.eos) == (0, 1)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.bos, again.eos, again.hash) == (0, 1, tokenizer.hash)


def test_an_export_begins_with_what_the_post_processor_adds(tmp_path):
    # A folder may name another token BOS, which templates write.
    library = tokenizers.Tokenizer.from_str(plain_definition("<s>", "</s>"))
    library.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 1)]
    )
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, JsonTokenizer)
    again = tokenizer.restated()
    assert [(item.bos, item.names["bos_token"]) for item in (tokenizer, again)] == [
        (1, "<s>")
    ] * 2


def test_private_characters_of_a_text_stand_for_no_token(bpe):
    # One of each stretch that could mark special tokens, all but the last.
    stretches = [chr(start) for start in range(0xF0000, 0x10FF00, 0x800)]
    for count in (1, 20, len(stretches) - 1):
        text = "".join(stretches[:count])
        [[before, token, after]] = bpe.encode_parts([[text, bpe.bos, text]])
        assert (bpe.decode(before), bpe.decode(after)) == (text, text)
        assert token.tolist() == [bpe.bos]
    with pytest.raises(UserError, match="remove some of them"):
        bpe.encode_parts([["".join(stretches)]])


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    subject = tokenizers.Tokenizer.from_str(plain_definition("<s>"))
    subject.enable_truncation(4)
    subject.enable_padding(length=64)
    (tmp_path / "tokenizer.json").write_text(subject.to_str())
    assert load_tokenizer(tmp_path).encode("hello there").shape == (11,)


def test_the_layout_of_the_file_does_not_change_the_hash(tmp_path):
    definition = plain_definition("<s>")
    spaced = json.dumps(json.loads(definition), indent=4)
    first = JsonTokenizer(definition, bos="<s>", eos=None)
    assert JsonTokenizer(spaced, bos="<s>", eos=None).hash == first.hash


def test_a_bad_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="no tokenizer at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"tokenizer\.json: it is not a tokenizer\.json"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(plain_definition("<s>"))
    with pytest.raises(UserError, match="no token '<nope>' to use as BOS"):
        load_tokenizer(tmp_path, bos="<nope>")
    (tmp_path / "tokenizer_config.json").write_text("nonsense")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "byte_tokenizer.json").write_text("[]")
    with pytest.raises(UserError, match="the byte tokenizer .* hold a JSON object"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="a byte tokenizer, which has no names"):
        load_tokenizer(tmp_path, bos="<s>")


def test_a_vocabulary_the_text_cannot_fill_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Bpe.vocabulary: must be >= 257 "):
        Bpe(vocabulary=200)
    with pytest.raises(UserError, match="yields only 2.. BPE tokens and .* for 400"):
        train_bpe(reading_of("too little text"), Bpe(vocabulary=400))
    (tmp_path / "a.txt").write_text("")
    empty = read_corpus(TextFiles(patterns=(str(tmp_path / "a.txt"),)))
    with pytest.raises(UserError, match="no text"):
        train_bpe(empty, Bpe(vocabulary=400))


def test_each_config_builds_its_tokenizer(bpe, tmp_path):
    (tmp_path / "a.txt").write_text(embedded_text()[:60_000])
    corpus = TextFiles(patterns=(str(tmp_path / "a.txt"),))
    bpe.save(tmp_path)

    def built(config):
        return build_tokenizer(config, corpus, validation_fraction=0.0).hash

    assert built(Bytes(bos=False)) == ByteTokenizer(bos=False).hash
    assert built(TokenizerFile(path=str(tmp_path))) == bpe.hash
    assert built(Bpe(vocabulary=500)) == bpe.hash
