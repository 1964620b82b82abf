"""Documents to tokens, the stream of all of them, and its two splits."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64

from recurjax.data.corpora import CorpusReading, Document
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError

_AT_ONCE = 1 << 22
"""Characters encoded by one call, so that a tokenizer can use several threads."""


class EncodedDocument(NamedTuple):
    """The tokens of one document, with what separates it from its neighbours.

    Attributes:
      ids: the tokens.
      text_bytes: length of the document in UTF-8.
      table_bytes: the sum of the tokens' `token_bytes`, by which streams are cut; equal
        to `text_bytes` for byte-level tokenizers.
      counted_bytes: the sum by `byte_table`.
      done: how far into the corpus it ends, as in `corpora.Document`.
    """

    ids: Int32[np.ndarray, " T"]
    text_bytes: int
    table_bytes: int
    counted_bytes: int
    done: int

    @property
    def token_bytes(self) -> int:
        """The bytes of text that the tokens stand for: all of the document's."""
        return self.text_bytes


def byte_table(tokenizer: Tokenizer) -> Int32[np.ndarray, " V"]:
    """Returns the bytes that each token counts for in bits per byte, before scaling.

    The unknown token counts for one at least, so that its nats are not left out.
    """
    table = tokenizer.token_bytes
    if tokenizer.unknown is not None and table[tokenizer.unknown] == 0:
        table = table.copy()
        table[tokenizer.unknown] = 1
    return table


def encoded_documents(
    reading: CorpusReading, tokenizer: Tokenizer, *, ends: bool | None = None
) -> Iterator[EncodedDocument]:
    """Encodes documents in order, several at a time.

    Args:
      reading: where they come from.
      tokenizer: its BOS, if it has one, comes before each document.
      ends: whether its EOS ends each document; None: where the tokenizer itself adds
        it, and where it has no BOS, so that documents do not run together.

    Raises:
      UserError: EOS is to end documents, and the tokenizer has none.
    """
    for group in groups_of(reading):
        yield from encode_group(group, tokenizer, ends=ends)


def groups_of(reading: CorpusReading) -> Iterator[list[Document]]:
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
        raise UserError(
            "the tokenizer has no EOS to end documents with: use one that has it"
        )
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
    table = byte_table(tokenizer)
    for document, ids in zip(group, encoded, strict=True):
        yield EncodedDocument(
            ids=np.concatenate([before, ids, after]),
            text_bytes=len(document.text.encode("utf-8")),
            # Of the tokens, which for a lossy tokenizer is not the text's length.
            table_bytes=int(tokenizer.token_bytes[ids].sum()),
            counted_bytes=int(table[ids].sum()),
            done=document.done,
        )


Span = tuple[int, int]
"""Tokens start .. stop-1 of a stream."""


@runtime_checkable
class TokenStream(Protocol):
    """All documents of a corpus, one after the other.

    Attributes:
      tokens: how many there are.
      starts: where each document begins, ascending from 0.
    """

    tokens: int
    starts: Int64[np.ndarray, " N"]

    def read(self, spans: Sequence[Span]) -> list[Int32[np.ndarray, " _"]]:
        """Returns the tokens of each span; spans may overlap."""
        ...


class MemoryStream:
    """A stream held in memory, in the smallest type that its ids fit."""

    def __init__(self, documents: Sequence[Int[np.ndarray, " _"]], *, vocabulary: int):
        dtype = token_dtype(vocabulary)
        # 16 bits per token where the vocabulary allows: half the memory of int32.
        self._ids = np.concatenate([ids.astype(dtype) for ids in documents])
        lengths = [len(ids) for ids in documents]
        self.starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        self.tokens = len(self._ids)

    def read(self, spans: Sequence[Span]) -> list[Int32[np.ndarray, " _"]]:
        return [self._ids[start:stop].astype(np.int32) for start, stop in spans]

    def sha256(self) -> str:
        """Identifies the tokens and the places where documents begin."""
        digest = hashlib.sha256(self._ids.tobytes())
        digest.update(self.starts.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The part start .. stop-1 of a stream: what one loader draws from."""

    name: str
    stream: TokenStream
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def document_starts(self) -> Int64[np.ndarray, " N"]:
        """Lists where the documents that begin in the split begin.

        The rest of one that begins before it is none of them.
        """
        starts = self.stream.starts
        # A span may begin inside a document, whose beginning is then in the other
        # split.
        return starts[(starts >= self.start) & (starts < self.stop)]

    def document_lengths(self) -> Int64[np.ndarray, " N"]:
        """Counts their tokens; the last document is cut where the split ends."""
        return np.diff(self.document_starts(), append=self.stop)


def token_dtype(vocabulary: int) -> type[np.uint16] | type[np.uint32]:
    """Chooses the type that tokens are stored in."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def validation_start(
    stream: TokenStream,
    *,
    document_bytes: Int64[np.ndarray, " N"],
    tokenizer: Tokenizer,
    fraction: float,
) -> int:
    """Finds the token at which the last `fraction` of the corpus' bytes begins.

    The place is given in bytes so that tokenizers share it, to within a token; it may
    be inside a document.

    Args:
      stream: the entire corpus.
      document_bytes: bytes of each document, the sum of its tokens' `token_bytes`.
      tokenizer: knows the bytes of a token.
      fraction: in [0, 1]; rounded down to a byte.
    """
    # Nothing is held back, and no token needs to be looked at.
    if fraction == 0.0:
        return stream.tokens
    target = int(fraction * int(document_bytes.sum()))
    # Counted from the end: bytes of the last document, of the last two, ...
    after = np.cumsum(document_bytes[::-1])
    documents = int(np.searchsorted(after, target, side="right"))
    first = len(document_bytes) - documents  # the first document that is all validation
    stop = stream.tokens if documents == 0 else int(stream.starts[first])
    if first == 0:
        # All of the corpus is validation.
        return stop
    inside = target - (int(after[documents - 1]) if documents else 0)
    # The cut is inside this document: its tokens are counted from its end.
    [ids] = stream.read([(int(stream.starts[first - 1]), stop)])
    return stop - validation_tokens(ids, tokenizer, inside)
