"""The tokenizer interface, and loading a tokenizer from disk.

Modules that need the `tokenizers` package are imported by the functions that use them.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, assert_never, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32

from recurjax.data.config import (
    Bpe,
    Bytes,
    Corpus,
    NanochatBpe,
    TokenizerConfig,
    TokenizerFile,
)
from recurjax.data.corpora import read_corpus
from recurjax.data.tokenizers.byte_tokenizer import BYTE_FILE, ByteTokenizer
from recurjax.data.tokenizers.checkpoint_text import TextSettings
from recurjax.data.tokenizers.symbols import SYMBOLS_FILE, Symbols
from recurjax.errors import UserError
from recurjax.files.json_files import read_json_object
from recurjax.files.storage import open_store, url_of


@runtime_checkable
class TextStream(Protocol):
    """Turns tokens into text as they come; the pieces join to `decode` of them all."""

    def skip(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> None:
        """Takes the first tokens, whose text is not returned.

        A character that they begin is theirs, also where later tokens end it.
        """
        ...

    def push(self, ids: Sequence[int]) -> str:
        """Takes further tokens and returns the text that has become certain."""
        ...

    def finish(self) -> str:
        """Returns what was held back, an unfinished character as U+FFFD."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Maps text to token ids and back.

    Attributes:
      vocabulary: V; every id is in [0, V).
      bos: the token that begins each text (document or prompt), or None. A checkpoint
        may name a BOS that begins no text: see `names`.
      eos: the token at which generated text ends, or None. Without a BOS it ends each
        document.
      adds_eos: whether EOS ends each document although there is a BOS.
      pad: the token that fills rows elsewhere, or None.
      unknown: the token of text that the vocabulary cannot write, or None.
      token_bytes: how many bytes of text each token has; special tokens 0. For
        byte-level tokenizers they sum to the length of the text in UTF-8.
      longest_token: the most bytes of text in one token; None: unbounded, since text
        may be folded, dropped or unknown.
      names: the special tokens by role (bos_token, ...), as chat templates write them.
      named_tokens: the special tokens by their names, which no text becomes.
      added_tokens: these and further tokens of the vocabulary that text may name.
      settings: what the checkpoint says about text besides its tokenizer.
      hash: SHA-256 of the definition, in hexadecimal.
    """

    vocabulary: int
    bos: int | None
    eos: int | None
    pad: int | None
    unknown: int | None
    token_bytes: Int32[np.ndarray, " V"]
    longest_token: int | None
    settings: TextSettings
    hash: str

    @property
    def adds_eos(self) -> bool: ...

    @property
    def names(self) -> Mapping[str, str | None]: ...

    @property
    def named_tokens(self) -> Mapping[str, int]: ...

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Encodes one text, without BOS; names of special tokens are plain text."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Encodes several texts, on all cores where the tokenizer can."""
        ...

    def encode_after(self, before: str, text: str) -> Int32[np.ndarray, " T"]:
        """Encodes a text that follows another one.

        Returns the tokens of `before + text` beyond those of `before`. Where a token
        reaches over the join, these are the tokens of `text` alone as they are in the
        middle of a text: without the space that some tokenizers put first.
        """
        ...

    def encode_parts(
        self,
        texts: Sequence[Sequence[str | int]],
        *,
        guarded: Mapping[str, int] | None = None,
    ) -> list[list[Int32[np.ndarray, " _"]]]:
        """Encodes texts that are given in parts, of which integers are tokens.

        Args:
          texts: each a list of parts; names of special tokens in a part are plain text.
          guarded: further names of added tokens that are plain text in the parts.

        Returns:
          For each text the tokens of each part; together they are those of the joined
          text. A token that reaches over a cut belongs to the earlier part.
        """
        ...

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        """Decodes without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Returns the text of a token, which may be a part of a character."""
        ...

    def stream(self) -> TextStream:
        """Begins an incremental decoding."""
        ...

    def save(self, directory: Path) -> None:
        """Writes the files that `load_tokenizer` reads back."""
        ...


def text_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a text: EOS, and others of the model's settings.

    A chat model's turn may end by another token than its documents: the
    generation_config.json that came with it names all of them.
    """
    ends = tokenizer.settings.ends
    if tokenizer.eos is not None:
        ends = (tokenizer.eos, *ends)
    # Settings of another model may name what this one cannot draw.
    return tuple(dict.fromkeys(i for i in ends if 0 <= i < tokenizer.vocabulary))


def first_token(tokenizer: Tokenizer) -> int | None:
    """Returns what an empty text is read as: BOS, one that begins no text, or EOS."""
    named = tokenizer.names.get("bos_token")
    candidates = (tokenizer.bos, tokenizer.added_tokens.get(named or ""), tokenizer.eos)
    return next((token for token in candidates if token is not None), None)


class Continued(NamedTuple):
    """The tokens of a text and of another one that continues it.

    Attributes:
      before: as the first text is encoded alone.
      after: what follows.
      apart: whether a token would reach over the join. Then `after` has the tokens of
        its text alone, as they are in the middle of a text.
    """

    before: Int32[np.ndarray, " _"]
    after: Int32[np.ndarray, " _"]
    apart: bool


def encode_continued(
    tokenizer: Tokenizer,
    texts: Sequence[tuple[Sequence[str | int], str]],
    *,
    guarded: Mapping[str, int] | None = None,
) -> list[Continued]:
    """Encodes texts, given in parts, and what continues each of them.

    The tokens decode to the joined text; those before the join are the prompt.

    Args:
      tokenizer: which.
      texts: the parts of each text, of which integers are tokens, and its continuation.
      guarded: see `Tokenizer.encode_parts`.
    """
    alone = tokenizer.encode_parts([parts for parts, _ in texts], guarded=guarded)
    joint = tokenizer.encode_parts([[*a, b] for a, b in texts], guarded=guarded)
    rows = []
    for (parts, text), text_ids, both in zip(texts, alone, joint, strict=True):
        before = np.concatenate([np.zeros(0, np.int32), *text_ids])
        apart = not np.array_equal(np.concatenate([before[:0], *both[:-1]]), before)
        # Only a text can join its last token with what follows.
        after = tokenizer.encode_after(str(parts[-1]), text) if apart else both[-1]
        rows.append(Continued(before, after, apart))
    return rows


def build_tokenizer(
    config: TokenizerConfig,
    corpus: Corpus,
    *,
    validation_fraction: float,
    used_bytes: int | None = None,
) -> Tokenizer:
    """Makes the tokenizer that a config asks for, trained on the corpus if it is a BPE.

    Args:
      config: what to make.
      corpus: is read by a BPE only.
      validation_fraction: the share at the end that a BPE does not look at.
      used_bytes: bytes of text, at least, that will be tokenized from the start of the
        corpus; the share is of those. None: all.

    Raises:
      UserError: it cannot be loaded, or the corpus does not serve to train it.
    """
    if isinstance(config, Bytes):
        return ByteTokenizer(bos=config.bos)
    if isinstance(config, TokenizerFile):
        return load_tokenizer(config.path, bos=config.bos, eos=config.eos)
    from recurjax.data.tokenizers.bpe import TrainingPart, train_bpe
    from recurjax.data.tokenizers.nanochat_bpe import train_nanochat_bpe

    # Merges counted on the validation text would make its tokens look easier.
    part = TrainingPart(share=1.0 - validation_fraction, used_bytes=used_bytes)
    match config:
        case Bpe():
            return train_bpe(read_corpus(corpus), config, part=part)
        case NanochatBpe():
            return train_nanochat_bpe(read_corpus(corpus), config, part=part)
        case _:
            assert_never(config)


def load_tokenizer(
    path: str | Path, *, bos: str | None = None, eos: str | None = None
) -> Tokenizer:
    """Loads a tokenizer.json, or the tokenizer that a folder holds.

    Args:
      path: the file, or a folder written by `Tokenizer.save` or by Hugging Face; either
        may be in a store (gs://, s3://).
      bos: name of the BOS token; None: see `recurjax.data.config.TokenizerFile`.
      eos: name of the EOS token, likewise.

    Raises:
      UserError: nothing there, not a tokenizer, or no such special token.
    """
    if (url := url_of(path)) is not None:
        return _load_from_store(url, bos=bos, eos=eos)
    path = Path(path).expanduser()
    # A folder of ours names its kind by its file; Hugging Face's has a tokenizer.json.
    if (path / BYTE_FILE).is_file():
        if bos is not None or eos is not None:
            raise UserError(
                f"{path} is a byte tokenizer, which has no names of tokens: leave "
                "bos and eos out"
            )
        return _load_bytes(path / BYTE_FILE)
    if (path / SYMBOLS_FILE).is_file():
        return Symbols.load(path / SYMBOLS_FILE)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {path}: name a tokenizer.json or its folder")
    from recurjax.data.tokenizers.json_tokenizer import JsonTokenizer

    return JsonTokenizer.load(file, bos=bos, eos=eos)


def _load_from_store(url: str, *, bos: str | None, eos: str | None) -> Tokenizer:
    # A file's neighbours say which of its tokens are BOS and EOS.
    is_file = url.endswith(".json")
    root, name = url.rsplit("/", 1) if is_file else (url, "")
    store = open_store(root)
    kinds = (".json", ".jinja")
    names = [at for at in store.sizes() if at.endswith(kinds) and "/" not in at]
    if not names or (is_file and name not in names):
        raise UserError(f"no tokenizer at {url}: name a tokenizer.json or its folder")
    with tempfile.TemporaryDirectory(prefix="recurjax-tokenizer-") as folder:
        for at in names:
            store.fetch(at, Path(folder) / at)
        return load_tokenizer(Path(folder) / name, bos=bos, eos=eos)


def _load_bytes(file: Path) -> ByteTokenizer:
    bos = read_json_object(file, "the byte tokenizer").get("bos")
    if type(bos) is not bool:
        raise UserError(
            f"the byte tokenizer {file}: bos must be true or false, got {bos!r}"
        )
    return ByteTokenizer(bos=bos)
