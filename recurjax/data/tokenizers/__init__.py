"""Tokenizers: the protocol and loading, bytes, any tokenizer.json, training a BPE.

`JsonTokenizer` is imported when it is first used, since it needs `tokenizers`.
"""

from typing import TYPE_CHECKING

from recurjax.data.tokenizers.byte_tokenizer import ByteTokenizer, count_characters
from recurjax.data.tokenizers.checkpoint_text import (
    TEMPLATE_FILE,
    TextSettings,
    read_template,
    read_text_settings,
)
from recurjax.data.tokenizers.loading import (
    Tokenizer,
    build_tokenizer,
    encode_continued,
    first_token,
    load_tokenizer,
    text_ends,
)
from recurjax.data.tokenizers.symbols import Symbols
from recurjax.lazy_names import lazy_names

if TYPE_CHECKING:
    from recurjax.data.tokenizers.json_tokenizer import (
        JsonTokenizer,
        byte_level_tokenizer,
    )

__all__ = [
    "ByteTokenizer",
    "JsonTokenizer",
    "Symbols",
    "TEMPLATE_FILE",
    "TextSettings",
    "Tokenizer",
    "build_tokenizer",
    "byte_level_tokenizer",
    "count_characters",
    "encode_continued",
    "first_token",
    "load_tokenizer",
    "read_template",
    "read_text_settings",
    "text_ends",
]

__getattr__, __dir__ = lazy_names(__name__)
