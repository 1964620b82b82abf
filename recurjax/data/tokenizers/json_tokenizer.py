"""Any tokenizer.json, through the `tokenizers` library."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from recurjax.data.tokenizers.byte_tokenizer import ByteStream, count_characters
from recurjax.data.tokenizers.companions import (
    CONFIG_FILE,
    Companions,
    read_companions,
)
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import parse_json, read_json_object

_BOS_NAMES = (
    "<|bos|>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<bos>",
    "<s>",
    "[BOS]",
    "<|endoftext|>",
)
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "<eos>", "</s>", "[EOS]")
NONE = "none"
"""In the place of a special token's name: there is no such token."""
_MOST = 1 << 24
"""Ids that a vocabulary may have: tables are as long as the largest."""
_PIECE = 1 << 16
"""Longer texts are cut about here, in characters, where that changes no token."""
_SAFE_CUT = re.compile(r"(?<=[\w.,;:!?'\")\]])\n(?=\w)")
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_characters() -> tuple[str, ...]:
    """Returns what stands for each of the 256 bytes in a byte-level vocabulary.

    GPT-2's alphabet: printable Latin-1 is itself, other bytes follow from 256 on.
    """
    # The bytes that are no printable characters get the code points from 256 on, in
    # order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (value for value in range(256) if value not in printable)
    codes = {value: 256 + number for number, value in enumerate(others)}
    return tuple(chr(codes.get(value, value)) for value in range(256))


class JsonTokenizer:
    """A tokenizer.json; the methods are those of `recurjax.data.tokenizers.Tokenizer`.

    Names of special tokens inside a text are plain text. Post-processing (BOS added by
    the file), truncation and padding of the file are not applied.

    Attributes:
      pad: the token that fills rows elsewhere, or None; nothing here asks for it.
      companions: what stands beside the file; no part of the tokenizer's identity.
    """

    def __init__(
        self,
        definition: str,
        *,
        bos: str | None = None,
        eos: str | None = None,
        stated: Mapping[str, str | None] | None = None,
        companions: Companions | None = None,
    ):
        """Builds it from the text of a tokenizer.json.

        Args:
          definition: the text.
          bos: name of the BOS token, `NONE` for none; None: what `stated` has under
            bos_token, even if that is None, else the first well-known name in the
            vocabulary, else none.
          eos: likewise, of the EOS token; without a well-known name BOS serves.
          stated: the names that tokenizer_config.json gives.
          companions: None: there are none.

        Raises:
          UserError: not a tokenizer, or `bos` or `eos` is not in its vocabulary.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises the bare class
            raise UserError(f"not a tokenizer.json: {error}") from error
        # Rows are cut by packing, not by the tokenizer, whatever its file asks for.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "<|bos|>" inside a text is text: no document may end another one.
        self._tokenizer.encode_special_tokens = True
        self._definition = definition
        self._json: dict[str, Any] = parse_json(definition, "it")
        self._ids_of = self._tokenizer.get_vocab(with_added_tokens=True)
        given = {"bos_token": bos, "eos_token": eos}
        # What the caller names goes before what the file states; an explicit "none" is
        # kept apart from a name that is not given.
        stated = {**(stated or {}), **{k: v for k, v in given.items() if v is not None}}
        stated = {role: None if v == NONE else v for role, v in stated.items()}
        bos = stated.get("bos_token", self._first_of(_BOS_NAMES))
        eos = stated.get("eos_token", self._first_of(_EOS_NAMES) or bos)
        self._names = {"bos_token": bos, "eos_token": eos}
        self.bos, self.eos = self._id(bos, "BOS"), self._id(eos, "EOS")
        # Configs name pads that no file has: such a pad is none.
        pad = stated.get("pad_token")
        self.pad = self._ids_of.get(pad) if pad is not None else None
        if self.pad is not None:
            self._names["pad_token"] = pad
        self.companions = companions or Companions()
        # Ids may have gaps: the table of bytes is as long as the largest id.
        self.vocabulary = max(self._ids_of.values(), default=-1) + 1
        if not 0 < self.vocabulary <= _MOST:
            raise UserError(
                f"its token ids must lie in 0 to {_MOST - 1}, the last is "
                f"{self.vocabulary - 1}"
            )
        self.token_bytes = np.array([len(piece) for piece in self._pieces], np.int32)
        # Special tokens belong to the identity: with others the same file is another
        # tokenizer.
        canonical = json.dumps([self._json, bos, eos], sort_keys=True)
        self.hash = hashlib.sha256(canonical.encode()).hexdigest()

    @classmethod
    def load(
        cls, file: Path, *, bos: str | None = None, eos: str | None = None
    ) -> "JsonTokenizer":
        """Reads a file; unnamed specials come from tokenizer_config.json or by name."""
        stated = _stated_specials(file.parent / CONFIG_FILE)
        try:
            definition = file.read_text(encoding="utf-8")
            made = cls(definition, bos=bos, eos=eos, stated=stated)
        except ValueError as error:  # of ours, or not UTF-8
            raise UserError(f"{file}: {error}") from error
        made.companions = read_companions(file.parent)
        return made

    def separated_by_eos(self) -> "JsonTokenizer":
        """Returns the same tokenizer with EOS, if there is one, in the place of BOS."""
        eos = self._names["eos_token"]
        return (
            self if eos is None else JsonTokenizer(self._definition, bos=eos, eos=eos)
        )

    @cached_property
    def named_tokens(self) -> dict[str, int]:
        """Returns the special tokens by their names, which no text becomes."""
        added = self._json.get("added_tokens") or []
        return {row["content"]: row["id"] for row in added if row.get("special")}

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        # Long texts in pieces: the library runs them in parallel, and its time grows
        # faster than a text's length.
        pieces = [_pieces(text) if self._cuts_at_lines else [text] for text in texts]
        flat = [piece for group in pieces for piece in group]
        encodings = self._tokenizer.encode_batch_fast(flat, add_special_tokens=False)
        ids = iter([np.array(encoding.ids, np.int32) for encoding in encodings])
        # Pieces of one text are joined again.
        return [np.concatenate([next(ids) for _ in group]) for group in pieces]

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        if self._byte_level:
            stream = ByteStream(self._pieces)
            return stream.push(ids) + stream.finish()
        known = [int(i) for i in ids if 0 <= i < self.vocabulary]
        return self._tokenizer.decode(known, skip_special_tokens=True)

    def bytes_of(self, token: int) -> bytes:
        return self._pieces[token] if token < self.vocabulary else b""

    def stream(self) -> "ByteStream | _WholeStream":
        if self._byte_level:
            return ByteStream(self._pieces)
        return _WholeStream(self, self._within_runs)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / "tokenizer.json", self._definition)
        text = json.dumps(self._names, indent=1) + "\n"
        write_atomic(directory / CONFIG_FILE, text)
        self.companions.save(directory)

    def _id(self, name: str | None, role: str) -> int | None:
        # None is a decision (no such token), not a name to look up.
        if name is None:
            return None
        if name not in self._ids_of:
            raise UserError(f"the tokenizer has no token {name!r} to serve as {role}")
        return self._ids_of[name]

    def _first_of(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self._ids_of), None)

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in self._decoders

    @cached_property
    def _decoders(self) -> set[str | None]:
        decoder = self._json.get("decoder") or {}
        return {part.get("type") for part in decoder.get("decoders", [decoder])}

    @cached_property
    def _within_runs(self) -> frozenset[int]:
        """The tokens that do not end a run of bytes, which is decoded as a whole."""
        if "ByteFallback" not in self._decoders:
            return frozenset()
        found = (i for token, i in self._ids_of.items() if _FALLBACK.fullmatch(token))
        # Special tokens are left out before anything is decoded.
        return frozenset([*found, *self.named_tokens.values()])

    @cached_property
    def _cuts_at_lines(self) -> bool:
        """Whether the line break between two words always ends a pre-token."""
        # A cut must be a place where the tokenizer itself would split.
        split = self._tokenizer.pre_tokenizer
        if not self._byte_level or split is None or self._json.get("normalizer"):
            return False
        for probe in ("a\nb", ".\nb", "1\n2", '"\nB'):
            # Pairs of a word or sign, a line break and a word: if each splits behind
            # the break, so does every text.
            pieces = split.pre_tokenize_str(probe)
            if pieces[0][0][0] == "Ġ" or all(end != 2 for _, (_, end) in pieces):
                return False
        return True

    @cached_property
    def _pieces(self) -> list[bytes]:
        """The bytes each token stands for; nothing for special tokens and gaps."""
        pieces = [b""] * self.vocabulary
        added = {token["id"]: token for token in self._json.get("added_tokens", [])}
        special = {i for i, token in added.items() if token["special"]}
        special |= {i for i in (self.bos, self.eos) if i is not None}
        for token, i in self._ids_of.items():
            if i in special:
                continue
            coded = self._byte_level and i not in added
            if coded and all(character in _BYTE_OF for character in token):
                pieces[i] = bytes(_BYTE_OF[character] for character in token)
            else:
                pieces[i] = _plain_bytes(token)
        return pieces


class _WholeStream:
    """Decodes everything so far at each step: for tokenizers that are not of bytes.

    What a run of byte-fallback tokens decodes to depends on all of them (one bad byte
    spoils the run), so it is shown when the run has ended.
    """

    def __init__(self, tokenizer: JsonTokenizer, within_runs: frozenset[int]):
        self._tokenizer, self._within_runs = tokenizer, within_runs
        self._ids: list[int] = []
        self._shown = 0
        # Where the skipped tokens' last run begins, and where they end, until it is
        # known how many characters of it are theirs.
        self._skipped: tuple[int, int] | None = None

    def skip(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> None:
        self.push(ids)
        start, end = self._certain(), len(self._ids)
        if self._bytes(start, end):
            self._skipped = start, end

    def push(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        self._ids.extend(int(i) for i in ids)
        return self._advance(self._ids[: self._certain()])

    def finish(self) -> str:
        return self._advance(self._ids)

    def _certain(self) -> int:
        """Counts the tokens before a last run of bytes."""
        end = len(self._ids)
        while end > 0 and self._ids[end - 1] in self._within_runs:
            end -= 1
        return end

    def _advance(self, ids: list[int]) -> str:
        if self._skipped is not None and len(ids) > self._skipped[0]:
            self._shown = max(self._shown, self._skipped_characters(*self._skipped))
            self._skipped = None
        text = self._tokenizer.decode(ids)
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _skipped_characters(self, start: int, end: int) -> int:
        """Counts those that tokens before `end` begin, once their run has ended."""
        stop = end
        while stop < len(self._ids) and self._ids[stop] in self._within_runs:
            stop += 1
        later = self._bytes(end, stop)
        try:
            self._bytes(start, stop).decode()
        except UnicodeDecodeError:  # then each byte is decoded to one U+FFFD
            new = len(later)
        else:
            new = count_characters(later)
        return len(self._tokenizer.decode(self._ids[:stop])) - new

    def _bytes(self, start: int, end: int) -> bytes:
        return b"".join(map(self._tokenizer.bytes_of, self._ids[start:end]))


def _stated_specials(file: Path) -> dict[str, str | None]:
    """Reads the special tokens as Hugging Face writes them, those that it has."""
    if not file.is_file():
        return {}
    config = read_json_object(file, "the tokenizer's config")
    stated = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        if key in config:
            value = config[key]
            value = value.get("content", 0) if isinstance(value, dict) else value
            if not isinstance(value, str | None):
                raise UserError(
                    f"{file}: {key} must be a token's name or null, got {config[key]!r}"
                )
            stated[key] = value
    return stated


def _pieces(text: str) -> list[str]:
    """Cuts a long text after line breaks that stand between two words."""
    pieces, start = [], 0
    while len(text) - start > _PIECE:
        cut = _SAFE_CUT.search(text, start + _PIECE)
        if cut is None:
            break
        pieces.append(text[start : cut.end()])
        start = cut.end()
    return [*pieces, text[start:]]


def _plain_bytes(token: str) -> bytes:
    """SentencePiece: the block character is a space, <0x0A> is one byte."""
    if _FALLBACK.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode("utf-8")


_BYTE_OF = {character: value for value, character in enumerate(byte_characters())}
