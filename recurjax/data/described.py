"""A corpus and a tokenizer from the words of a command line.

`recurjax train --corpus`, `recurjax data prepare --corpus` and whatever else takes
somebody's own text read the same words the same way.
"""

import glob
import re
from pathlib import Path, PurePosixPath
from typing import Literal

from recurjax.data.config import (
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
from recurjax.data.tokenizers import NONE, load_tokenizer
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


def describe_corpus(
    words: tuple[str, ...],
    *,
    format: Format = "auto",
    field: str = "text",
    split: str = "train",
    separator: str | None = None,
) -> Corpus:
    r"""Returns the corpus that files, globs or one folder name.

    A folder is one of TFDS, one that `recurjax data prepare` wrote, or stands for all
    files in it and below whose names end as a format's do. The word `embedded` is the
    text in the package.

    Args:
      words: paths, quoted globs, folders, or the same behind hf://, gs:// or s3://;
        files behind https://.
      format: "auto" goes by the names, and takes unknown ones as text.
      field: with the text (jsonl, parquet, tfds).
      split: to read (tfds).
      separator: between two documents of a text file, `\n` and `\t` spelled out.

    Raises:
      UserError: the words mix formats, name nothing, or an option is of another format.
    """
    # The text in the package is one document, whatever field or split say.
    if words == ("embedded",) and format == "auto":
        return EmbeddedText()
    words = tuple(part for word in words for part in _unfolded(word, format))
    kind = _guessed_format(words) if format == "auto" else format
    if separator is not None and kind != "text":
        raise UserError(f"--separator is for text files, the corpus is {kind}")
    match kind:
        case "jsonl":
            return JsonLines(patterns=words, field=field)
        case "parquet":
            return Parquet(patterns=words, field=field)
        case "arrayrecord":
            return ArrayRecords(patterns=words)
        case "tfds":
            return Tfds(directory=_only(words, "TFDS"), split=split, field=field)
        case "prepared":
            return Prepared(directory=_only(words, "prepared"))
        case _:
            return TextFiles(
                patterns=words, separator=separator and _unescaped(separator)
            )


def describe_tokenizer(
    text: str, *, bos: str | None = None, eos: str | None = None
) -> TokenizerConfig:
    """Returns the tokenizer that a word names.

    Args:
      text: bytes, bytes-without-bos, bpe:SIZE, nanochat-bpe:SIZE, or the path of a
        tokenizer.json or of a folder with a tokenizer.
      bos, eos: of a tokenizer.json, see `TokenizerFile`.

    Raises:
      UserError: no size, or token names for a tokenizer that has its own.
    """
    choice = _tokenizer(text)
    if (bos, eos) == (None, None):
        return choice
    if not isinstance(choice, TokenizerFile):
        raise UserError(
            f"--bos and --eos name tokens of a tokenizer.json, and {text} has its own"
        )
    # `--eos none` says what ends documents; generated text still has its end.
    return TokenizerFile(path=text, bos=bos, eos=None if eos == NONE else eos)


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
        wanted = ", ".join(
            e for e, kind in FORMAT_OF.items() if format in ("auto", kind)
        )
        raise UserError(f"{word} is a folder without a file that ends in {wanted}")
    root = word.rstrip("/")
    # A bracket in a folder's own name is no glob.
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
            f"the corpus mixes {' and '.join(sorted(kinds))}: say which with --format"
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
        raise UserError(f"name one {kind} folder, got {', '.join(words)}")
    return words[0]


def _tokenizer(text: str) -> TokenizerConfig:
    if text in ("bytes", "bytes-without-bos"):
        return Bytes(bos=text == "bytes")
    kind, colon, size = text.partition(":")
    if kind in _TRAINED:
        if not colon:
            raise UserError(
                f"--tokenizer {kind} wants a vocabulary size, such as {kind}:8192"
            )
        if not size.isdecimal():
            raise UserError(f"--tokenizer {kind}:SIZE wants a number, got {size!r}")
        return _TRAINED[kind](vocabulary=int(size))
    return TokenizerFile(path=text)


def _unescaped(text: str) -> str:
    """Lets a shell's backslash-n stand for a line break."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
