"""Documents to tokens, and where a stream of tokens is cut for validation."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from recurjax.data.corpora import Document, Reading
from recurjax.data.tokenizers import Tokenizer

_AT_ONCE = 1 << 22
"""Characters encoded by one call, so that a tokenizer can use several threads."""


class EncodedDocument(NamedTuple):
    """The tokens of one document, BOS first where the tokenizer has one.

    Attributes:
      ids: the tokens.
      text_bytes: length of the document in UTF-8.
      token_bytes: the sum of the tokens' `token_bytes`; equal to `text_bytes` for
        byte-level tokenizers.
      done: how far into the corpus it ends, as in `corpora.Document`.
    """

    ids: Int32[np.ndarray, " T"]
    text_bytes: int
    token_bytes: int
    done: int


def encoded_documents(
    reading: Reading, tokenizer: Tokenizer
) -> Iterator[EncodedDocument]:
    """Encodes documents in order, several at a time."""
    group: list[Document] = []
    size = 0
    for document in reading.documents:
        group.append(document)
        size += len(document.text)
        if size >= _AT_ONCE:
            yield from _encoded(group, tokenizer)
            group, size = [], 0
    yield from _encoded(group, tokenizer)


def validation_tokens(
    ids: Int32[np.ndarray, " T"], tokenizer: Tokenizer, wanted_bytes: int
) -> int:
    """Returns how many tokens at the end of `ids` make at most `wanted_bytes` bytes.

    BOS before the first of them counts as theirs.
    """
    after = np.cumsum(tokenizer.token_bytes[ids[::-1]], dtype=np.int64)
    return int(np.searchsorted(after, wanted_bytes, side="right"))


def _encoded(group: list[Document], tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    encoded = tokenizer.encode_many([document.text for document in group])
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    for document, ids in zip(group, encoded, strict=True):
        yield EncodedDocument(
            ids=np.concatenate([np.array(first, np.int32), ids]),
            text_bytes=len(document.text.encode("utf-8")),
            token_bytes=int(tokenizer.token_bytes[ids].sum()),
            done=document.done,
        )
