"""GGUF headers byte by byte, intact and damaged; the package gguf is not needed."""

import struct

import pytest

from recurjax.convert.formats.gguf_header import GgufTensor, read_header
from recurjax.convert.formats.gguf_tokenizer import gguf_tokenizer
from recurjax.errors import UserError


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


FIELDS = [
    text("general.alignment") + struct.pack("<II", 4, 64),
    text("a.float") + struct.pack("<If", 6, 0.5),
    text("a.flag") + struct.pack("<I?", 7, True),
    text("a.words") + struct.pack("<IIQ", 9, 8, 2) + text("one") + text("zwei é"),
    text("a.numbers") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
]
TENSORS = [
    text("m") + struct.pack("<IQQIQ", 2, 4, 3, 0, 0),
    text("v") + struct.pack("<IQIQ", 1, 32, 8, 64),
]


def header(*, fields=FIELDS, tensors=TENSORS, magic=b"GGUF", version=3):
    counts = struct.pack("<IQQ", version, len(tensors), len(fields))
    return magic + counts + b"".join([*fields, *tensors])


def write(tmp_path, data):
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    return file


def test_fields_and_places_are_read(tmp_path):
    data = header()
    fields, tensors = read_header(write(tmp_path, data + b"\0" * 300))
    assert fields == {
        "general.alignment": 64,
        "a.float": 0.5,
        "a.flag": True,
        "a.words": ["one", "zwei é"],
        "a.numbers": [1, -2, 3],
    }
    start = -(-len(data) // 64) * 64
    assert tensors == [
        GgufTensor("m", (3, 4), 0, start),
        GgufTensor("v", (32,), 8, start + 64),
    ]


def test_a_header_cut_anywhere_is_refused(tmp_path):
    data = header()
    for length in range(len(data)):
        with pytest.raises(ValueError, match="ends inside its header"):
            read_header(write(tmp_path, data[:length]))


ENDLESS = struct.pack("<IIQ", 9, 8, 2**60)


@pytest.mark.parametrize(
    "data, reason",
    [
        (header(magic=b"GGML"), "does not begin with GGUF"),
        (header(version=0x03000000), "its version is 50331648"),
        (header(fields=FIELDS[:2] + FIELDS[:1]), "field general.alignment twice"),
        (header(tensors=TENSORS[:1] * 2), "a tensor twice"),
        (header(fields=[text("x") + struct.pack("<I", 99)]), "unknown type 99"),
        (header(fields=[text("x") + ENDLESS]), "ends inside its header"),
        (header(fields=[struct.pack("<Q", 2**62)]), "ends inside its header"),
        (header(tensors=[text("m") + struct.pack("<I", 9)]), "m has 9 axes"),
        (
            header(fields=[text("general.alignment") + struct.pack("<II", 4, 0)]),
            "its alignment is 0",
        ),
    ],
)
def test_a_header_that_lies_is_refused(data, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        read_header(write(tmp_path, data))


WORDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 2,
}


def test_a_tokenizer_of_the_header_s_fields():
    tokenizer = gguf_tokenizer(WORDS, where="m.gguf")
    assert tokenizer.encode("aba").tolist() == [2, 0]
    assert (tokenizer.vocabulary, tokenizer.eos) == (3, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "m.gguf has no list of strings tokenizer.ggml.tokens"),
        ({"merges": None}, "m.gguf has no list of strings tokenizer.ggml.merges"),
        ({"tokens": [1, 2, 3]}, "no list of strings tokenizer.ggml.tokens"),
        ({"merges": ["a c"]}, "m.gguf: merges do not fit the tokens"),
        ({"merges": ["a"]}, "m.gguf: each merge must be two tokens"),
        ({"eos_token_id": 3}, "eos_token_id must be a token's number, got 3"),
        ({"eos_token_id": -1}, "eos_token_id must be a token's number, got -1"),
        ({"token_type": 3}, "token_type must be a list"),
        ({"model": ["gpt2"]}, "the tokenizer must be"),
    ],
)
def test_a_tokenizer_that_is_not_whole_is_refused(change, message):
    fields = WORDS | {f"tokenizer.ggml.{name}": v for name, v in change.items()}
    with pytest.raises(UserError, match=message):
        gguf_tokenizer(fields, where="m.gguf")
