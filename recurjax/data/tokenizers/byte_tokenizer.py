"""The tokenizer without a vocabulary to learn: a token for each byte of UTF-8."""

import codecs
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from jaxtyping import Int, Int32

from recurjax.data.tokenizers.checkpoint_text import TextSettings
from recurjax.files.atomic import write_atomic

BYTE_FILE = "byte_tokenizer.json"


class NamelessTokens:
    """A tokenizer in which no text names a token and every text is encoded alike."""

    names: Mapping[str, str | None] = MappingProxyType({})
    named_tokens: Mapping[str, int] = MappingProxyType({})
    added_tokens: Mapping[str, int] = MappingProxyType({})
    adds_eos = False
    pad: int | None = None
    unknown: int | None = None
    longest_token: int | None = 1

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        raise NotImplementedError

    def encode_many(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        return [self.encode(text) for text in texts]

    def encode_after(self, before: str, text: str) -> Int32[np.ndarray, " T"]:
        return self.encode(text)

    def encode_parts(
        self,
        texts: Sequence[Sequence[str | int]],
        *,
        guarded: Mapping[str, int] | None = None,
    ) -> list[list[Int32[np.ndarray, " _"]]]:
        return [
            [
                np.array([part], np.int32)
                if isinstance(part, int)
                else self.encode(part)
                for part in parts
            ]
            for parts in texts
        ]


class ByteTokenizer(NamelessTokens):
    """The 256 bytes, and BOS = 256 when `bos` is true; BOS then ends text too.

    The methods are those of `recurjax.data.tokenizers.Tokenizer`.
    """

    def __init__(self, *, bos: bool = True):
        self.vocabulary = 257 if bos else 256
        self.bos = 256 if bos else None
        self.eos = self.bos
        self.settings = TextSettings()
        self.token_bytes = np.ones(self.vocabulary, np.int32)
        # BOS has no text: losses in bits per byte do not count it.
        self.token_bytes[256:] = 0
        self._definition = json.dumps({"bos": bos, "type": "bytes"})
        self.hash = hashlib.sha256(self._definition.encode()).hexdigest()

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        stream = self.stream()
        return stream.push(ids) + stream.finish()

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def stream(self) -> "ByteStream":
        return ByteStream(_BYTES)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / BYTE_FILE, self._definition + "\n")


class ByteStream:
    """Decodes tokens that stand for bytes, holding back unfinished characters."""

    def __init__(self, pieces: Sequence[bytes]):
        """Begins a text; `pieces[i]` holds token i's bytes, later ids have none."""
        # A character of several bytes may be split between two pushes; the decoder
        # waits for its rest, and bytes that can be no character become U+FFFD.
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skipped = 0

    def skip(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> None:
        self.push(ids)
        # Pending bytes become one character, complete or U+FFFD; the bytes of a
        # surrogate, which is never valid in UTF-8, become one U+FFFD each.
        waiting, _ = self._decoder.getstate()
        self._skipped = len(waiting.decode(errors="replace"))

    def push(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        known = len(self._pieces)
        # BOS and ids beyond the vocabulary have no text.
        data = b"".join(self._pieces[int(i)] for i in ids if 0 <= i < known)
        return self._new(self._decoder.decode(data))

    def finish(self) -> str:
        return self._new(self._decoder.decode(b"", final=True))

    def _new(self, text: str) -> str:
        if not (self._skipped and text):
            return text
        new = text[self._skipped :]
        self._skipped = max(0, self._skipped - len(text))
        return new


_BYTES = [bytes([value]) for value in range(256)]


def count_characters(data: bytes) -> int:
    """Counts the characters that begin in a piece of UTF-8."""
    # All further bytes of a character have the form 10xxxxxx.
    return sum(byte & 0xC0 != 0x80 for byte in data)
