"""The tokenizer of symbols without text: a token's name is its number."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from recurjax.data.tokenizers.byte_tokenizer import NamelessTokens
from recurjax.data.tokenizers.checkpoint_text import TextSettings
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import read_json_object

SYMBOLS_FILE = "symbols.json"
_MOST = 1 << 24


class Symbols(NamelessTokens):
    """V symbols, written as numbers with a space between: "3 14 1".

    There is neither BOS nor EOS, and symbols stand for no bytes of text. The methods
    are those of `recurjax.data.tokenizers.Tokenizer`.
    """

    # Spaces between numbers may be many.
    longest_token: int | None = None

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.bos: int | None = None
        self.eos: int | None = None
        self.settings = TextSettings()
        self.token_bytes = np.zeros(vocabulary, np.int32)
        self._definition = json.dumps({"type": "symbols", "vocabulary": vocabulary})
        self.hash = hashlib.sha256(self._definition.encode()).hexdigest()

    @classmethod
    def load(cls, file: Path) -> "Symbols":
        """Reads what `save` wrote.

        Raises:
          UserError: the file does not describe symbols.
        """
        content = read_json_object(file, "the description of symbols")
        vocabulary = content.get("vocabulary")
        if type(vocabulary) is not int or not 0 < vocabulary <= _MOST:
            raise UserError(
                f"{file}: vocabulary must be an integer from 1 to {_MOST}, got "
                f"{vocabulary!r}"
            )
        return cls(vocabulary)

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Reads numbers.

        Raises:
          UserError: a word is not a number of a symbol.
        """
        words = text.split()
        for word in words:
            # Digits of other scripts are digits for Python too; ten of them are too
            # large.
            known = word.isascii() and word.isdigit() and len(word) < 10
            if not known or int(word) >= self.vocabulary:
                raise UserError(
                    f"{word!r} is not a symbol: this model reads integers from 0 to "
                    f"{self.vocabulary - 1}, separated by spaces"
                )
        return np.array([int(word) for word in words], np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        return " ".join(str(int(number)) for number in ids)

    def bytes_of(self, token: int) -> bytes:
        return str(token).encode()

    def stream(self) -> "SymbolStream":
        return SymbolStream()

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / SYMBOLS_FILE, self._definition + "\n")


class SymbolStream:
    """Decodes as the symbols come."""

    def __init__(self):
        self._begun = False

    def skip(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> None:
        self.push(ids)

    def push(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> str:
        text = "".join(f" {int(number)}" for number in ids)
        # The space between this text and the next is written before the next.
        if not self._begun:
            text = text.removeprefix(" ")
        self._begun = self._begun or bool(text)
        return text

    def finish(self) -> str:
        return ""
