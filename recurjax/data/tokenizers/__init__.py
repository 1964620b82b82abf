"""Tokenizers: the protocol and loading, bytes, any tokenizer.json, training a BPE."""

from recurjax.data.tokenizers.byte_tokenizer import ByteTokenizer, count_characters
from recurjax.data.tokenizers.checkpoint_text import (
    TEMPLATE_FILE,
    TextSettings,
    read_template,
    read_text_settings,
)
from recurjax.data.tokenizers.json_tokenizer import NONE, JsonTokenizer
from recurjax.data.tokenizers.loading import (
    Tokenizer,
    build_tokenizer,
    encode_continued,
    first_token,
    load_tokenizer,
    text_ends,
)
from recurjax.data.tokenizers.symbols import Symbols

__all__ = [
    "ByteTokenizer",
    "JsonTokenizer",
    "NONE",
    "Symbols",
    "TEMPLATE_FILE",
    "TextSettings",
    "Tokenizer",
    "build_tokenizer",
    "count_characters",
    "encode_continued",
    "first_token",
    "load_tokenizer",
    "read_template",
    "read_text_settings",
    "text_ends",
]
