"""Documents to tokens, and where a stream of tokens is cut for validation."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from recurjax.data.corpora import Document, Reading
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError

_AT_ONCE = 1 << 22
"""Characters encoded by one call, so that a tokenizer can use several threads."""


class EncodedDocument(NamedTuple):
    """The tokens of one document, with what separates it from its neighbours.

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
    reading: Reading, tokenizer: Tokenizer, *, ends: bool | None = None
) -> Iterator[EncodedDocument]:
    """Encodes documents in order, several at a time.

    Args:
      reading: where they come from.
      tokenizer: its BOS, if it has one, comes before each document.
      ends: whether its EOS ends each document; None: where the tokenizer itself adds
        it, and where it has no BOS, so that documents do not run together.

    Raises:
      UserError: EOS is asked for, and the tokenizer has none.
    """
    for group in groups_of(reading):
        yield from encode_group(group, tokenizer, ends=ends)


def groups_of(reading: Reading) -> Iterator[list[Document]]:
    """Yields the documents in order, as many at a time as one call should encode."""
    group: list[Document] = []
    size = 0
    for document in reading.documents:
        group.append(document)
        size += len(document.text)
        # Groups of a few long documents or of many short ones: a call has enough for
        # all threads, and memory for one group only.
        if size >= _AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_group(
    group: list[Document], tokenizer: Tokenizer, *, ends: bool | None
) -> Iterator[EncodedDocument]:
    """Encodes documents by one call; see `encoded_documents`."""
    after = closing(tokenizer, ends)
    before = [] if tokenizer.bos is None else [tokenizer.bos]
    around = np.array(before, np.int32), np.array(after, np.int32)
    yield from _encoded(group, tokenizer, *around)


def closing(tokenizer: Tokenizer, ends: bool | None) -> list[int]:
    """Lists what comes after each document, EOS or nothing: see `encoded_documents`."""
    if ends is None:
        # Something must mark the end of a document: BOS of the next one, or else EOS.
        ends = tokenizer.adds_eos or (
            tokenizer.bos is None and tokenizer.eos is not None
        )
    if not ends:
        return []
    if tokenizer.eos is None:
        raise UserError("the tokenizer has no EOS to put after each document")
    return [tokenizer.eos]


def validation_tokens(
    ids: Int32[np.ndarray, " T"], tokenizer: Tokenizer, wanted_bytes: int
) -> int:
    """Returns how many tokens at the end of `ids` make at most `wanted_bytes` bytes.

    BOS before the first of them counts as theirs; EOS alone is none of them.
    """
    if wanted_bytes == 0:
        return 0
    # Summed from the end backwards; a token that crosses the boundary stays in
    # training.
    after = np.cumsum(tokenizer.token_bytes[ids[::-1]], dtype=np.int64)
    return int(np.searchsorted(after, wanted_bytes, side="right"))


def _encoded(
    group: list[Document], tokenizer: Tokenizer, before: np.ndarray, after: np.ndarray
) -> Iterator[EncodedDocument]:
    encoded = tokenizer.encode_many([document.text for document in group])
    for document, ids in zip(group, encoded, strict=True):
        yield EncodedDocument(
            ids=np.concatenate([before, ids, after]),
            text_bytes=len(document.text.encode("utf-8")),
            # Of the tokens, which for a lossy tokenizer is not the text's length.
            token_bytes=int(tokenizer.token_bytes[ids].sum()),
            done=document.done,
        )
