"""Any tokenizer.json, through the `tokenizers` library."""

import bisect
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int, Int32
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from recurjax.data.config import NONE
from recurjax.data.tokenizers.byte_tokenizer import ByteStream, ByteTokenizer
from recurjax.data.tokenizers.checkpoint_text import (
    TextSettings,
    read_text_settings,
    write_tokenizer_config,
)
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import parse_json

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
_MOST = 1 << 24
"""Ids that a vocabulary may have: tables are as long as the largest."""
_PIECE = 1 << 16
"""Longer texts are cut about here, in characters, where that changes no token."""
_SAFE_CUT = re.compile(r"(?<=[\w.,;:!?'\")\]])\n(?=\w)")
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PLANES = range(0xF0000, 0x10FF00, 0x800)
"""Private-use characters; a run of them represents the names of added tokens."""
_MOST_GUARDS = 8
"""Tokenizers with such names in memory at once, each as large as the tokenizer."""
_ANCHORS = ("a", ".", "\n", "1", "(", "x", "\u4e2d", " a")
"""Texts behind which another one begins in the middle of a text."""


def byte_characters() -> tuple[str, ...]:
    """Returns the character for each of the 256 bytes in a byte-level vocabulary.

    GPT-2's alphabet: printable Latin-1 is itself, other bytes follow from 256 on.
    """
    # The bytes that are not printable characters get the code points from 256 on, in
    # order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (value for value in range(256) if value not in printable)
    codes = {value: 256 + number for number, value in enumerate(others)}
    return tuple(chr(codes.get(value, value)) for value in range(256))


def byte_level_tokenizer(tokenizer: ByteTokenizer) -> "JsonTokenizer":
    """Returns a byte tokenizer as a tokenizer.json: 256 tokens and no merges."""
    vocabulary = {name: value for value, name in enumerate(byte_characters())}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    library.decoder = decoders.ByteLevel()
    name = NONE
    if tokenizer.bos is not None:
        name = _BOS_NAMES[0]
        # The next id, 256.
        library.add_special_tokens([name])
    return JsonTokenizer(library.to_str(), bos=name, eos=name)


class JsonTokenizer:
    """A tokenizer.json; the methods are those of `recurjax.data.tokenizers.Tokenizer`.

    Names of special tokens inside a text are plain text. Truncation and padding of the
    file are not applied. What its post-processor adds to a text is `bos` and
    `adds_eos`; callers put these tokens where they begin and end a text.

    Attributes:
      names: the special tokens by role (bos_token, eos_token, pad_token, unk_token), as
        chat templates and exports write them; None: there is no such token.
      pad: the token that fills rows elsewhere, or None; nothing here uses it.
      unknown: the token of text that the vocabulary cannot write, or None.
      longest_token: the most bytes of text in one token, or None.
      settings: what the checkpoint says about text besides its tokenizer.json; no part
        of the tokenizer's identity.
    """

    def __init__(
        self,
        definition: str | bytes,
        *,
        bos: str | None = None,
        eos: str | None = None,
        settings: TextSettings | None = None,
        begins_with_bos: bool | None = None,
        restate: bool = True,
    ):
        """Builds it from the text of a tokenizer.json.

        Args:
          definition: the text; bytes are taken as UTF-8.
          bos: name of the token that begins each text, `NONE` for none; None: the token
            that the file's post-processor puts there, if any.
          eos: name of the EOS token, `NONE` for none; None: as `settings` state, else
            the first well-known name in the vocabulary, else BOS.
          settings: what the checkpoint's other files say; None: nothing.
          begins_with_bos: whether the BOS that `settings` name begins each text; None:
            as the post-processor says.
          restate: let the definition that `save` writes have a post-processor that adds
            these tokens, so that every reader of the file adds them.

        Raises:
          UserError: not a tokenizer, or `bos` or `eos` is not in its vocabulary.
        """
        self.settings = settings or TextSettings()
        # UTF-8: as a str, one emoji makes each character of a file take four bytes.
        data = definition.encode() if isinstance(definition, str) else definition
        self._tokenizer = _library_tokenizer(data)
        self._definition = self._with_added_tokens(data)
        # Read here and dropped: of a large vocabulary it is larger than the tokenizer.
        values: dict[str, Any] = parse_json(self._definition, "it")
        self._ids_of = self._tokenizer.get_vocab(with_added_tokens=True)
        rows = values.get("added_tokens") or []
        self.added_tokens: Mapping[str, int] = {r["content"]: r["id"] for r in rows}
        self._specials = frozenset(r["id"] for r in rows if r.get("special"))
        self.named_tokens: Mapping[str, int] = {
            name: i for name, i in self.added_tokens.items() if i in self._specials
        }
        names = self._resolved_names({"bos_token": bos, "eos_token": eos})
        self.names: Mapping[str, str | None] = names
        self._id(names["bos_token"], "BOS")
        self.eos = self._id(names["eos_token"], "EOS")
        before, after = self._post_processed()
        if bos is not None or begins_with_bos is not None:
            begin = names["bos_token"] if bos is not None or begins_with_bos else None
            before = () if begin is None else (self._ids_of[begin],)
        if len(before) > 1 or after not in ((), (self.eos,)):
            raise UserError(
                f"its post-processor puts the tokens {list(before)} before a text "
                f"and {list(after)} after it, and recurjax supports at most one "
                "before and EOS after: change it"
            )
        self.bos = before[0] if before else None
        self.adds_eos = bool(after)
        if restate and (before, after) != self._post_processed():
            self._state_post_processor(before, after)
            values = parse_json(self._definition, "it")
        # Else `save` writes the layout by which `load` knows that BOS begins texts.
        self._states_bos = (before, after) == self._post_processed()
        # A pad token that no vocabulary has is none.
        self.pad = self._ids_of.get(names.get("pad_token") or "")
        if self.pad is None:
            names.pop("pad_token", None)
        # Ids may have gaps: the table of bytes is as long as the largest id.
        self.vocabulary = max(self._ids_of.values(), default=-1) + 1
        if not 0 < self.vocabulary <= _MOST:
            raise UserError(
                f"its token ids must be from 0 to {_MOST - 1}, got "
                f"{self.vocabulary - 1}"
            )
        model, decoder = values.get("model") or {}, values.get("decoder") or {}
        parts = {part.get("type") for part in decoder.get("decoders", [decoder])}
        self._byte_level = "ByteLevel" in parts
        self._falls_back = "ByteFallback" in parts
        self._normalizes = bool(values.get("normalizer"))
        self._typed_names = _typed_names(model, self.named_tokens)
        self.token_bytes = np.array([len(piece) for piece in self._pieces], np.int32)
        self.unknown = self._unknown(model)
        exact = self._byte_level and not self._normalizes
        self.longest_token = int(self.token_bytes.max()) if exact else None
        # Special tokens belong to the identity: with others the same file is another
        # tokenizer.
        begin = None if self.bos is None else self._tokenizer.id_to_token(self.bos)
        identity = [values, begin, names["eos_token"]]
        canonical = json.dumps(identity, sort_keys=True)
        self.hash = hashlib.sha256(canonical.encode()).hexdigest()

    @classmethod
    def load(
        cls, file: Path, *, bos: str | None = None, eos: str | None = None
    ) -> "JsonTokenizer":
        """Reads a file, and what the files next to it say about text."""
        try:
            settings = read_text_settings(file.parent)
            by_name = bos is None and settings.bos_by_name
            return cls(
                file.read_bytes(),
                bos=bos,
                eos=eos,
                settings=settings,
                begins_with_bos=True if by_name else None,
                # Such files keep their hash, which prepared data and runs state.
                restate=not by_name,
            )
        except ValueError as error:  # of ours, or not UTF-8
            raise UserError(f"{file}: {error}") from error

    def separated_by_eos(self) -> "JsonTokenizer":
        """Returns the same tokenizer with EOS, if there is one, in the place of BOS."""
        eos = self.names["eos_token"]
        return (
            self if eos is None else JsonTokenizer(self._definition, bos=eos, eos=eos)
        )

    def restated(self) -> "JsonTokenizer":
        """Returns a tokenizer whose own definition adds the token before a text."""
        return JsonTokenizer(
            self._definition,
            settings=replace(self.settings, names=self.names, added=()),
            begins_with_bos=None if self._states_bos else self.bos is not None,
        )

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        # Long texts in pieces: the library runs them in parallel, and its time grows
        # faster than a text's length.
        pieces = [_pieces(text) if self._cuts_at_lines else [text] for text in texts]
        flat = [piece for group in pieces for piece in group]
        encodings = self._plain.encode_batch_fast(flat, add_special_tokens=False)
        ids = iter([np.array(encoding.ids, np.int32) for encoding in encodings])
        # Pieces of one text are joined again.
        return [np.concatenate([next(ids) for _ in group]) for group in pieces]

    def encode_after(self, before: str, text: str) -> Int32[np.ndarray, " T"]:
        if before:
            ids = self._beyond(before, text)
            if ids is not None:
                return ids
        # A token reaches over the join: the text's own tokens, without what the
        # tokenizer does at the beginning of a text only.
        if not self._alters_beginnings:
            return self.encode(text)
        for anchor in _ANCHORS:
            ids = self._beyond(anchor, text)
            if ids is not None:
                return ids
        return self.encode(text)

    def encode_parts(
        self,
        texts: Sequence[Sequence[str | int]],
        *,
        guarded: Mapping[str, int] | None = None,
    ) -> list[list[Int32[np.ndarray, " _"]]]:
        # In another tokenizer every guarded name is a private character: the parts that
        # are tokens are written as such characters, and a name that somebody typed is
        # plain text. Flags (lstrip, normalized, ...) and the rules for the beginning of
        # a text apply as in the text that a template wrote.
        names = {**self.named_tokens, **(guarded or {})}
        flat = [part for parts in texts for part in parts]
        for part in flat:
            if isinstance(part, int) and part not in names.values():
                names[self._tokenizer.id_to_token(part) or ""] = part
        used = set().union(*(part for part in flat if isinstance(part, str)))
        plane = next(
            (
                start
                for start in _PLANES
                if not any(start <= ord(sign) < start + 0x800 for sign in used)
            ),
            None,
        )
        if plane is None:
            raise UserError(
                "a text uses characters of every block of Unicode's private "
                "planes, one of which must be free to mark special tokens: remove "
                "some of them"
            )
        marks = {name: chr(plane + n) for n, name in enumerate(sorted(names))}
        numbers = {number: name for name, number in names.items()}
        written = {names[name]: mark for name, mark in marks.items()}
        library = self._guarding(tuple(marks.items()))
        rows = [
            _EncodedRow(parts, [p if isinstance(p, str) else written[p] for p in parts])
            for parts in texts
        ]
        encodings = library.encode_batch(
            [row.text for row in rows], add_special_tokens=False
        )
        cut = []
        for row, encoding in zip(rows, encodings, strict=True):
            # A token that must be a word of its own is text where it touches one.
            if any(missed := row.missed(encoding)):
                row = _EncodedRow(
                    row.parts,
                    [
                        numbers[part] if miss and isinstance(part, int) else piece
                        for part, piece, miss in zip(
                            row.parts, row.pieces, missed, strict=True
                        )
                    ],
                )
                encoding = library.encode(row.text, add_special_tokens=False)
            cut.append(row.cut(encoding))
        return cut

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        stream = self.stream()
        return stream.push(ids) + stream.finish()

    def bytes_of(self, token: int) -> bytes:
        return self._pieces[token] if token < self.vocabulary else b""

    def stream(self) -> "ByteStream | _PieceStream":
        if self._byte_level:
            return ByteStream(self._pieces)
        return _PieceStream(self._tokenizer, self._fallback_bytes, self._ordinary)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / "tokenizer.json", self._definition)
        write_tokenizer_config(directory, self.names, bos_by_name=not self._states_bos)
        self.settings.save(directory)

    def _with_added_tokens(self, definition: bytes) -> bytes:
        """Adds the tokens of `settings` that the file lacks; returns the definition."""
        id_of = self._tokenizer.token_to_id
        missing = [row for row in self.settings.added if id_of(row.content) is None]
        for row in missing:
            self._tokenizer.add_tokens([AddedToken(row.content, **row.flags)])
            got = self._tokenizer.token_to_id(row.content)
            if got != row.id:
                raise UserError(
                    f"added_tokens_decoder gives {row.content!r} the id {row.id}, but "
                    f"the next free id of tokenizer.json is {got}: correct one of the "
                    "two"
                )
        return self._tokenizer.to_str().encode() if missing else definition

    def _resolved_names(
        self, explicit: Mapping[str, str | None]
    ) -> dict[str, str | None]:
        names = dict(self.settings.names)
        for role, number in self.settings.ids.items():
            name = self._tokenizer.id_to_token(number)
            if name is not None:
                names.setdefault(role, name)
        # An explicit "none" differs from a name that is not given.
        names |= {role: name for role, name in explicit.items() if name is not None}
        names = {role: None if name == NONE else name for role, name in names.items()}
        names.setdefault("bos_token", self._first_of(_BOS_NAMES))
        names.setdefault("eos_token", self._first_of(_EOS_NAMES) or names["bos_token"])
        return names

    def _post_processed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tokens that the file's post-processor puts around a text."""
        if self._tokenizer.post_processor is None:
            return (), ()
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        around = self._tokenizer.encode("a", add_special_tokens=True).ids
        extra = len(around) - len(plain)
        for n in range(extra + 1):
            if around[n : n + len(plain)] == plain:
                return tuple(around[:n]), tuple(around[n + len(plain) :])
        return (), ()

    def _state_post_processor(
        self, before: tuple[int, ...], after: tuple[int, ...]
    ) -> None:
        names = {i: self._tokenizer.id_to_token(i) for i in (*before, *after)}
        single = [f"{names[i]}:0" for i in before] + ["$A:0"]
        single += [f"{names[i]}:0" for i in after]
        second = [f"{names[i]}:1" for i in before] + ["$B:1"]
        second += [f"{names[i]}:1" for i in after]
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(single),
            pair=" ".join(single + second),
            special_tokens=[(name, i) for i, name in names.items()],
        )
        self._definition = self._tokenizer.to_str().encode()

    def _id(self, name: str | None, role: str) -> int | None:
        # None is a decision (no such token), not a name to look up.
        if name is None:
            return None
        if name not in self._ids_of:
            raise UserError(
                f"the tokenizer has no token {name!r} to use as {role}: name one "
                "that it has"
            )
        return self._ids_of[name]

    def _first_of(self, names: Sequence[str]) -> str | None:
        return next(
            (name for name in names if self._tokenizer.token_to_id(name) is not None),
            None,
        )

    def _beyond(self, before: str, text: str) -> Int32[np.ndarray, " T"] | None:
        """Returns the tokens of `before + text` beyond those of `before`.

        None: a token reaches over the join, or `before` ends in other tokens there.
        """
        alone, joint = self._plain.encode_batch(
            [before, before + text], add_special_tokens=False
        )
        count = len(alone.ids)
        if joint.ids[:count] != alone.ids:
            return None
        # Bytes of one character may be on both sides; so may the text of one token.
        if any(end > len(before) for _, end in joint.offsets[:count]):
            return None
        return np.array(joint.ids[count:], np.int32)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The library's tokenizer in which no text becomes a special token."""
        if not self._typed_names:
            return self._tokenizer
        # Names that nobody can type.
        secret = secrets.token_hex(16)
        marks = {name: f"{secret}{n}" for n, name in enumerate(self._typed_names)}
        renamed = json.dumps(_renamed(self._definition, marks))
        return _library_tokenizer(renamed.encode())

    def _guarding(self, marks: tuple[tuple[str, str], ...]) -> tokenizers.Tokenizer:
        """Returns the library's tokenizer in which names are private characters."""
        guard = self._guards.get(marks)
        if guard is None:
            guard = tokenizers.Tokenizer.from_str(
                json.dumps(_renamed(self._definition, dict(marks)))
            )
            # Texts choose the marks: those that a server's users send fill no memory.
            if len(self._guards) >= _MOST_GUARDS:
                self._guards.clear()
            self._guards[marks] = guard
        return guard

    @cached_property
    def _guards(self) -> dict[tuple[tuple[str, str], ...], tokenizers.Tokenizer]:
        return {}

    def _unknown(self, model: Mapping[str, Any]) -> int | None:
        if model.get("type") == "Unigram":
            return model.get("unk_id")
        name = self.names.get("unk_token") or model.get("unk_token")
        return self._ids_of.get(name) if name is not None else None

    @cached_property
    def _alters_beginnings(self) -> bool:
        """Whether a text's first tokens differ from those in the middle of a text."""
        for probe in ("a", " a", "."):
            ids = self._beyond("\n", probe)
            if ids is None or not np.array_equal(ids, self.encode(probe)):
                return True
        return False

    @cached_property
    def _fallback_bytes(self) -> dict[int, int]:
        """The byte of each token of a byte-fallback vocabulary."""
        if not self._falls_back:
            return {}
        return {
            i: int(token[3:5], 16)
            for token, i in self._ids_of.items()
            if _FALLBACK.fullmatch(token)
        }

    @cached_property
    def _ordinary(self) -> frozenset[int]:
        """The tokens that the library's decoder writes: neither special nor bytes."""
        ids = self._ids_of.values()
        return frozenset(
            i for i in ids if i not in self._specials and i not in self._fallback_bytes
        )

    @cached_property
    def _cuts_at_lines(self) -> bool:
        """Whether the line break between two words always ends a pre-token."""
        # A cut must be a place where the tokenizer itself would split.
        split = self._tokenizer.pre_tokenizer
        if not self._byte_level or split is None or self._normalizes:
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
        """The bytes of each token; none for special tokens and gaps."""
        pieces = [b""] * self.vocabulary
        silent = {*self._specials, self.bos, self.eos}
        added = set(self.added_tokens.values())
        for token, i in self._ids_of.items():
            if i in silent:
                continue
            coded = self._byte_level and i not in added
            if coded and all(character in _BYTE_OF for character in token):
                pieces[i] = bytes(_BYTE_OF[character] for character in token)
            else:
                pieces[i] = _plain_bytes(token)
        return pieces


class _PieceStream:
    """Decodes tokens that are not of bytes, each by a constant amount of work.

    The library decodes the new tokens after the last ordinary one, whose own text is
    cut off: what a decoder does at the beginning of a text happens there only. Tokens
    of byte fallback wait for the rest of their character; a byte that is not text
    becomes U+FFFD when its run ends.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        bytes_of: Mapping[int, int],
        ordinary: frozenset[int],
    ):
        self._library, self._bytes_of, self._ordinary = library, bytes_of, ordinary
        self._last: int | None = None  # the last ordinary token
        self._begun = False  # whether any text was written
        self._waiting: list[int] = []  # tokens of an unfinished character
        self._spoiled = False  # whether this run of bytes has one that is not text
        self._skipped = 0  # how many of these belong to the skipped text

    def skip(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> None:
        # Only the last ordinary token and the bytes after it matter for what follows.
        tail: list[int] = []
        for token in map(int, reversed(ids)):
            if token in self._ordinary:
                self._last = token
                break
            tail.append(token)
        self.push(tail[::-1])
        self._begun |= self._last is not None
        self._skipped = len(self._waiting)

    def push(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        text, run = "", []
        for token in map(int, ids):
            if token in self._bytes_of:
                text += self._written(run) + self._take_byte(token)
                run = []
            elif token in self._ordinary:
                text += self._end_bytes()
                run.append(token)
        return text + self._written(run)

    def finish(self) -> str:
        return self._end_bytes()

    def _written(self, run: list[int]) -> str:
        """Decodes ordinary tokens."""
        if not run:
            return ""
        text = self._behind(run)
        self._last = run[-1]
        return text

    def _take_byte(self, token: int) -> str:
        self._waiting.append(token)
        try:
            if self._spoiled:
                return self._replaced()
            bytes(self._bytes_of[i] for i in self._waiting).decode()
        except UnicodeDecodeError as error:
            # The beginning of a character waits for its rest; anything else is not
            # text, and neither is what follows in the same run.
            self._spoiled = error.reason != "unexpected end of data"
            return self._replaced() if self._spoiled else ""
        # A character belongs to the text that its first byte is in.
        text = "" if self._skipped else self._behind(self._waiting)
        self._waiting, self._skipped, self._begun = [], 0, True
        return text

    def _end_bytes(self) -> str:
        self._spoiled = False
        return self._replaced() if self._waiting else ""

    def _replaced(self) -> str:
        """Writes U+FFFD for each byte that waits, as the library does."""
        count = len(self._waiting) - self._skipped
        self._waiting, self._skipped, self._begun = [], 0, True
        return "\ufffd" * count

    def _behind(self, ids: list[int]) -> str:
        """Decodes tokens as they read after the text so far."""
        if self._last is not None:
            before = self._decoded([self._last])
            text = self._decoded([self._last, *ids])[len(before) :]
        elif self._begun:
            # Only bytes came so far: replace them by any character of one byte.
            text = self._decoded([self._one_byte, *ids])[1:]
        else:
            text = self._decoded(ids)
        self._begun = True
        return text

    @cached_property
    def _one_byte(self) -> int:
        return next(i for i, byte in self._bytes_of.items() if 32 < byte < 127)

    def _decoded(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=True)


def _library_tokenizer(definition: bytes) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library raises the bare class
        raise UserError(f"it is not a tokenizer.json: {error}") from error
    # Rows are cut by packing, not by the tokenizer, whatever its file asks for.
    library.no_truncation()
    library.no_padding()
    # "<|bos|>" inside a text is text: no document may end another one.
    library.encode_special_tokens = True
    return library


def _typed_names(model: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns the names of special tokens that a text becomes by `model`.

    A model that looks words up in its vocabulary, as Unigram does, finds the names of
    special tokens there, although the library does not seek them in texts.
    SentencePiece itself never makes a control symbol of a text.
    """
    vocabulary = model.get("vocab") or {}
    rows = vocabulary if isinstance(vocabulary, dict) else dict(vocabulary)
    present = {name for name in names if name in rows}
    if model.get("type", "BPE") == "BPE" and not model.get("ignore_merges"):
        # It makes words by merges, of single characters.
        merges = model.get("merges") or []
        single = any(len(name) == 1 for name in present)
        if not single and not any(_makes(merge, present) for merge in merges):
            return set()
    return present


def _renamed(definition: bytes, marks: Mapping[str, str]) -> dict[str, Any]:
    """Returns a tokenizer.json in which added tokens have other names, ids unchanged.

    In the vocabulary too: a piece of that name could be made of a user's text.
    """
    values = parse_json(definition, "it")
    for row in values.get("added_tokens") or []:
        row["content"] = marks.get(row["content"], row["content"])
    model = values["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {marks.get(name, name): i for name, i in vocabulary.items()}
    else:
        model["vocab"] = [[marks.get(name, name), score] for name, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = marks.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [
            merge for merge in model["merges"] if not _makes(merge, marks)
        ]
    values["post_processor"] = values["truncation"] = values["padding"] = None
    return values


class _EncodedRow(NamedTuple):
    """A text in parts, and each part as it is written in the text that is encoded."""

    parts: Sequence[str | int]
    pieces: Sequence[str]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def missed(self, encoding: tokenizers.Encoding) -> list[bool]:
        """Returns which of the parts that are tokens did not become one."""
        owned = self.cut(encoding)
        return [
            isinstance(part, int) and part not in ids
            for part, ids in zip(self.parts, owned, strict=True)
        ]

    def cut(self, encoding: tokenizers.Encoding) -> list[Int32[np.ndarray, " _"]]:
        """Cuts the tokens at the parts; one that reaches over a cut is the first's."""
        ends = list(itertools.accumulate(map(len, self.pieces)))
        owned: list[list[int]] = [[] for _ in self.parts]
        at = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            at = max(at, bisect.bisect_right(ends, start))
            # A token that takes the spaces before it still is its own part.
            if ends[at] < end and token == self.parts[at + 1]:
                at += 1
            owned[at].append(token)
        return [np.array(part, np.int32) for part in owned]


def _makes(merge: str | list[str], names: Collection[str]) -> bool:
    pair = merge.split(" ") if isinstance(merge, str) else merge
    return any(text in names for text in (*pair, "".join(pair)))


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
