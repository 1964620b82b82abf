"""A corpus as one stream of tokens, read anywhere, and its parts for training."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64

from recurjax.data.encoding import validation_tokens
from recurjax.data.tokenizers import Tokenizer

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
        # 16 bits a token where the vocabulary allows: half the memory of int32.
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
    lie inside a document.

    Args:
      stream: the whole corpus.
      document_bytes: of each document, the sum of its tokens' `token_bytes`.
      tokenizer: knows the bytes of a token.
      fraction: in [0, 1]; rounded down to whole bytes.
    """
    # Nothing is held back, and no token needs to be looked at.
    if fraction == 0.0:
        return stream.tokens
    wanted = int(fraction * int(document_bytes.sum()))
    # Counted from the end: bytes of the last document, of the last two, ...
    after = np.cumsum(document_bytes[::-1])
    whole = int(np.searchsorted(after, wanted, side="right"))
    first = len(document_bytes) - whole  # the first document that is all validation
    stop = stream.tokens if whole == 0 else int(stream.starts[first])
    if first == 0:
        # All of the corpus is validation.
        return stop
    left = wanted - (int(after[whole - 1]) if whole else 0)
    # The cut lies inside this document: its tokens are counted from its end.
    [ids] = stream.read([(int(stream.starts[first - 1]), stop)])
    return stop - validation_tokens(ids, tokenizer, left)
