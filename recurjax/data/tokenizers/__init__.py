"""Tokenizers: the protocol and loading, bytes, any tokenizer.json, training a BPE."""

from recurjax.data.tokenizers.byte_tokenizer import ByteTokenizer, count_characters
from recurjax.data.tokenizers.companions import Companions
from recurjax.data.tokenizers.json_tokenizer import NONE, JsonTokenizer
from recurjax.data.tokenizers.loading import (
    Tokenizer,
    build_tokenizer,
    load_tokenizer,
    text_ends,
)
from recurjax.data.tokenizers.symbols import Symbols

__all__ = [
    "ByteTokenizer",
    "Companions",
    "JsonTokenizer",
    "NONE",
    "Symbols",
    "Tokenizer",
    "build_tokenizer",
    "count_characters",
    "load_tokenizer",
    "text_ends",
]
