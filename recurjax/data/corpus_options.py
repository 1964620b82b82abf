"""A corpus and a tokenizer in the words of a command line.

`recurjax train --corpus` and `recurjax data prepare --corpus` take the same options.
"""

import glob
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from recurjax.data.config import (
    NONE,
    ArrayRecords,
    Bpe,
    Bytes,
    Corpus,
    EmbeddedText,
    JsonLines,
    Mixture,
    NanochatBpe,
    Parquet,
    Prepared,
    TextFiles,
    Tfds,
    TokenizerConfig,
    TokenizerFile,
)
from recurjax.data.corpora import names_below
from recurjax.data.prepared import MANIFEST, TOKENIZER, read_manifest
from recurjax.data.tokenizers import load_tokenizer
from recurjax.errors import UserError
from recurjax.files.storage import url_of

Format = Literal["auto", "text", "jsonl", "parquet", "arrayrecord", "tfds"]

FORMAT_OF = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
}
"""By the end of a file's name, before `.gz`; other files named one by one are text."""

_TRAINED = {"bpe": Bpe, "nanochat-bpe": NanochatBpe}


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions:
    r"""A corpus and its tokenizer.

    Attributes:
      corpus: files, quoted globs ('docs/**/*.txt') or a folder; also of the Hugging
        Face Hub ('hf://datasets/OWNER/NAME/*.parquet'), of a bucket (gs://, s3://) or
        at a URL (https://). `embedded` is the Shakespeare text in the package. A folder
        may be a TFDS data set, the output of `recurjax data prepare`, or any other, of
        which all files with a known ending are read.
      tokenizer: bytes, bytes-without-bos, bpe:SIZE or nanochat-bpe:SIZE (both trained
        on the corpus), or the path of a tokenizer.json or of a folder with a tokenizer.
      bos: the token of a tokenizer.json that begins each document, or none; None: the
        tokenizer's own.
      eos: the token of a tokenizer.json that ends each document, or none; None: the
        tokenizer's own if documents have no BOS, else none.
      format: format of the corpus; auto: by the file names, and text for unknown ones.
      field: the field or column with the text, of jsonl, parquet and tfds.
      split: the split to read, of tfds.
      separator: the string between two documents of a text file, with \n and \t for
        line break and tab; None: each file is one document.
    """

    corpus: tuple[str, ...] = ()
    tokenizer: str | None = None
    bos: str | None = None
    eos: str | None = None
    format: Format = "auto"
    field: str = "text"
    split: str = "train"
    separator: str | None = None

    def describes_files(self) -> bool:
        """Whether an option says how to read the files of `corpus`."""
        options = (self.format, self.field, self.split, self.separator)
        return options != ("auto", "text", "train", None)

    def corpus_config(self) -> Corpus:
        """Returns the corpus.

        Raises:
          UserError: the words mix formats, name nothing, or an option is of another
            format.
        """
        # The text in the package is one document, whatever field or split say.
        if self.corpus == ("embedded",) and self.format == "auto":
            return EmbeddedText()
        words = tuple(
            part for word in self.corpus for part in _unfolded(word, self.format)
        )
        kind = _guessed_format(words) if self.format == "auto" else self.format
        if self.separator is not None and kind != "text":
            raise UserError(
                f"--separator splits text files only, and the corpus is {kind}: "
                "leave it out"
            )
        match kind:
            case "jsonl":
                return JsonLines(patterns=words, field=self.field)
            case "parquet":
                return Parquet(patterns=words, field=self.field)
            case "arrayrecord":
                return ArrayRecords(patterns=words)
            case "tfds":
                folder = _only(words, "TFDS")
                return Tfds(directory=folder, split=self.split, field=self.field)
            case "prepared":
                return Prepared(directory=_only(words, "prepared"))
            case _:
                separator = self.separator and _unescaped(self.separator)
                return TextFiles(patterns=words, separator=separator)

    def tokenizer_config(self) -> TokenizerConfig | None:
        """Returns the tokenizer; None: --tokenizer names none.

        Raises:
          UserError: no size, or token names for a tokenizer that has its own.
        """
        named = (self.bos, self.eos) != (None, None)
        if self.tokenizer is None:
            if named:
                raise UserError(
                    "--bos and --eos name tokens of --tokenizer, which is missing: "
                    "add it"
                )
            return None
        choice = _tokenizer(self.tokenizer)
        if not named:
            return choice
        if not isinstance(choice, TokenizerFile):
            raise UserError(
                "--bos and --eos name tokens of a tokenizer.json, and "
                f"{self.tokenizer} defines its own: leave them out"
            )
        # `--eos none` says what ends documents; generated text still has its end.
        eos = None if self.eos == NONE else self.eos
        return TokenizerFile(path=self.tokenizer, bos=self.bos, eos=eos)


def own_tokenizer(corpus: Corpus) -> TokenizerConfig | None:
    """Returns the tokenizer that a prepared corpus brings; None: it holds text."""
    if not isinstance(corpus, Prepared):
        return None
    return TokenizerFile(path=f"{corpus.directory.rstrip('/')}/{TOKENIZER}")


def vocabulary_of(tokenizer: TokenizerConfig) -> int:
    """Counts a tokenizer's tokens; trains none.

    Raises:
      UserError: there is no such tokenizer on disk.
    """
    match tokenizer:
        case Bytes():
            return 257 if tokenizer.bos else 256
        case Bpe() | NanochatBpe():
            return tokenizer.vocabulary
        case TokenizerFile():
            loaded = load_tokenizer(
                tokenizer.path, bos=tokenizer.bos, eos=tokenizer.eos
            )
            return loaded.vocabulary


def name_of(corpus: Corpus) -> str:
    """Returns a short name for a corpus, fit for a part of a file's name."""
    match corpus:
        case EmbeddedText():
            return "embedded"
        case Prepared() | Tfds():
            return _slug(Path(corpus.directory).expanduser().absolute().name)
        case Mixture():
            return "_".join(part.name for part in corpus.parts)
        case _:
            return _slug(_named_part(corpus.patterns[0]))


def _named_part(pattern: str) -> str:
    """Returns a file's name without its endings, or the last folder before a glob."""
    scheme, _, rest = pattern.rpartition("://")
    parts = PurePosixPath(rest).parts
    if scheme == "hf" and len(parts) >= 3:  # datasets, OWNER, NAME
        return parts[2].partition("@")[0]
    plain = [part for part in parts if not re.search(r"[*?\[]", part)]
    if len(plain) < len(parts):
        folder = Path(*plain) if plain else Path()
        return folder.expanduser().absolute().name
    last = PurePosixPath(rest).name
    return last.partition(".")[0] or last


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").lower() or "text"


def _unfolded(word: str, format: Format) -> tuple[str, ...]:
    """Returns globs for the files in a folder; any other word as it is.

    Known folders, of TFDS and of `data prepare`, stay one word.
    """
    if format == "tfds" or re.search(r"[*?\[]", word):
        return (word,)
    # Whatever its name: Spark writes folders such as wiki.jsonl.
    names = names_below(word)
    if names is None or {"dataset_info.json", MANIFEST} & set(names):
        return (word,)
    ends = {_ending(name) for name in names}
    ends = {end for end in ends if end is not None}
    if format != "auto":
        ends = {end for end in ends if _format(end) == format}
    if not ends:
        accepted = ", ".join(
            e for e, kind in FORMAT_OF.items() if format in ("auto", kind)
        )
        raise UserError(
            f"{word} is a folder without a file that ends in {accepted}: name "
            "another folder or --format"
        )
    root = word.rstrip("/")
    # A bracket in a folder's own name is not a glob.
    root = root if "://" in root else glob.escape(root)
    return tuple(f"{root}/**/*{end}" for end in sorted(ends))


def _ending(name: str) -> str | None:
    """Returns a name's known end, `.jsonl.gz` say, or None."""
    if _format(name) is None:
        return None
    plain = name.removesuffix(".gz")
    return PurePosixPath(plain).suffix + name[len(plain) :]


def _format(name: str) -> str | None:
    plain = name.removesuffix(".gz")
    end = PurePosixPath(plain).suffix or plain  # ".txt" alone is an end, not a name
    return FORMAT_OF.get(end)


def _guessed_format(words: tuple[str, ...]) -> str:
    kinds = {_kind(word) for word in words}
    if len(kinds) > 1:
        raise UserError(
            f"the corpus mixes {' and '.join(sorted(kinds))}: name one with --format"
        )
    return kinds.pop() if kinds else "text"


def _kind(word: str) -> str:
    if url_of(word) is not None:
        if _format(word) is None and MANIFEST in (names_below(word) or ()):
            return "prepared"
        return _format(word) or "text"
    folder = Path(word).expanduser()
    if (folder / "dataset_info.json").is_file():
        return "tfds"
    if (folder / MANIFEST).is_file():
        # Its fields are not needed yet: a damaged one is refused now, in its own words.
        read_manifest(folder)
        return "prepared"
    return _format(word) or "text"


def _only(words: tuple[str, ...], kind: str) -> str:
    if len(words) != 1:
        raise UserError(
            f"--corpus takes exactly one {kind} folder, got {', '.join(words)}"
        )
    return words[0]


def _tokenizer(text: str) -> TokenizerConfig:
    if text in ("bytes", "bytes-without-bos"):
        return Bytes(bos=text == "bytes")
    kind, colon, size = text.partition(":")
    if kind in _TRAINED:
        if not colon:
            raise UserError(
                f"--tokenizer {kind} needs a vocabulary size, such as {kind}:8192"
            )
        if not size.isdecimal():
            raise UserError(
                f"--tokenizer {kind}:SIZE needs an integer SIZE, such as "
                f"{kind}:8192, got {size!r}"
            )
        return _TRAINED[kind](vocabulary=int(size))
    return TokenizerFile(path=text)


def _unescaped(text: str) -> str:
    """Lets a shell's backslash-n stand for a line break."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
