"""`recurjax data`: prepares token shards, checks them and shows what is in them."""

import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from recurjax.cli.options import Command, parse, run_command, shows_usage
from recurjax.data.config import NONE, Bpe, NanochatBpe, Prepared
from recurjax.data.corpus_options import CorpusOptions
from recurjax.data.prepared import (
    MANIFEST,
    TOKENIZER,
    PreparedManifest,
    PreparedStream,
    merge,
    prepare,
    prepared_here,
    read_manifest,
    shown_progress,
    verify_checksums,
)
from recurjax.data.streams import closing
from recurjax.data.tokenizers import Tokenizer, build_tokenizer, load_tokenizer
from recurjax.errors import UserError
from recurjax.files.atomic import refuse_existing
from recurjax.files.storage import fetched_folder, sent_folder, url_of
from recurjax.ranges import (
    Fraction,
    NonNegativeInt,
    PositiveInt,
    RangeChecks,
    check_ranges,
)

USAGE = """usage: recurjax data COMMAND ...

  recurjax data prepare --out DIR --corpus FILES   tokenize a corpus into shards
  recurjax data merge --out DIR PARTS              join the parts of prepare --part i/n
  recurjax data verify DIR                         check every file's checksum
  recurjax data show DIR                           print rows with document borders

recurjax data COMMAND --help lists the options of each."""

PREPARE_USAGE = """usage: recurjax data prepare --out DIR --corpus FILES [options]

  recurjax data prepare --out data/books --corpus 'books/**/*.txt' --tokenizer bpe:8192

Tokenizes a corpus into a directory of shards, which `recurjax train NAME --corpus
data/books` reads. recurjax data prepare --help lists the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions(CorpusOptions):
    """Tokenizes a corpus into a directory of ArrayRecord shards with a manifest.

    Attributes:
      out: the new directory, here or in a bucket, written atomically. The same command
        continues a stopped preparation after its last full shard.
      validation_fraction: share of the corpus, from its end, that is the validation
        split, in bytes.
      shard_tokens: tokens per file.
      max_tokens: stop after the document that reaches this number of tokens; None: the
        full corpus. The validation split is a share of the text up to there.
      workers: processes that tokenize; the result is the same for any number.
      part: i/n, the part of the corpus to tokenize, such as one per machine, for
        `recurjax data merge`; None: the full corpus.
    """

    out: Path
    tokenizer: str | None = "bytes"
    validation_fraction: Fraction = 0.1
    shard_tokens: PositiveInt = 1 << 26
    max_tokens: PositiveInt | None = None
    workers: PositiveInt = 1
    part: str | None = None

    def __post_init__(self):
        check_ranges(self)
        if not self.corpus:
            raise UserError(
                "--corpus is missing: name the files to prepare, or embedded"
            )
        if self.part is not None:
            self.stretch()

    def stretch(self) -> tuple[int, int] | None:
        """Returns (i, n) of --part i/n."""
        if self.part is None:
            return None
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                "--part needs i/n with i from 1 to n, such as 1/4 and 4/4, got "
                f"{self.part}"
            )
        if self.max_tokens is not None:
            raise UserError(
                "--max-tokens counts from the beginning of the corpus, which a "
                "--part does not see: leave one of the two out"
            )
        return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions:
    """Joins parts into the directory that one process would write, byte for byte.

    Attributes:
      out: the new directory, written atomically.
      parts: the directories of all parts, in any order.
    """

    parts: Annotated[tuple[str, ...], tyro.conf.Positional]
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowOptions(RangeChecks):
    """Prints rows of a prepared directory as text, with document borders.

    Attributes:
      folder: the prepared directory, here or in a bucket.
      rows: number of rows.
      first: index of the first row, from 0.
      length: tokens per row.
    """

    folder: Annotated[str, tyro.conf.Positional]
    rows: PositiveInt = 3
    first: NonNegativeInt = 0
    length: PositiveInt = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Compares every file of a prepared directory with its checksum.

    Attributes:
      folder: the prepared directory, here or in a bucket.
    """

    folder: Annotated[str, tyro.conf.Positional]


def run(args: list[str]) -> int:
    """Runs `recurjax data ARGS` and returns its exit code.

    Raises:
      UserError: a mistake that the user can correct.
    """
    commands: dict[str, Command] = {
        "prepare": run_prepare,
        "merge": run_merge,
        "show": run_show,
        "verify": run_verify,
    }
    return run_command(args, commands, prog="recurjax data", usage=USAGE)


def run_prepare(args: list[str]) -> int:
    """Runs `recurjax data prepare ARGS`."""
    if shows_usage(args, PREPARE_USAGE, help=False):
        return 0
    options = parse(PrepareOptions, args, prog="recurjax data prepare")
    url = url_of(options.out)
    # Check before tokenizing anything.
    if url is None:
        refuse_existing(options.out)
        return _prepare(options, options.out, str(options.out))
    # The manifest goes last: without it a directory does not count as prepared.
    with sent_folder(url, last=MANIFEST) as folder:
        return _prepare(options, folder, url)


def run_merge(args: list[str]) -> int:
    """Runs `recurjax data merge --out DIR PARTS`."""
    options = parse(MergeOptions, args, prog="recurjax data merge")
    with ExitStack() as stack:
        url, out = url_of(options.out), options.out
        if url is not None:
            out = stack.enter_context(sent_folder(url, last=MANIFEST))
        parts = [_fetched(part, stack) for part in options.parts]
        progress = stack.enter_context(shown_progress(doing="merging"))
        manifest = merge(parts, out, progress=progress)
    print(_summary(url or str(options.out), manifest))
    return 0


def _fetched(part: str, stack: ExitStack) -> Path:
    url = url_of(part)
    return Path(part) if url is None else stack.enter_context(fetched_folder(url))


def _prepare(options: PrepareOptions, out: Path, folder: str) -> int:
    corpus, choice = options.corpus_config(), options.tokenizer_config()
    assert choice is not None  # it has a default
    if isinstance(corpus, Prepared):
        raise UserError(
            f"--corpus: {corpus.directory} is prepared already: name the text "
            "to prepare"
        )
    # Training takes minutes on a large corpus, before the progress bar begins.
    if isinstance(choice, Bpe | NanochatBpe):
        print(f"training a BPE of {choice.vocabulary} tokens ...", file=sys.stderr)
    tokenizer = build_tokenizer(
        choice,
        corpus,
        validation_fraction=options.validation_fraction,
        # A token of a byte-level tokenizer has at least one byte.
        used_bytes=options.max_tokens,
    )
    # --eos NAME puts this token after each document, "none" puts nothing.
    ends = None if options.eos is None else options.eos != NONE
    with shown_progress() as progress:
        manifest = prepare(
            corpus,
            tokenizer,
            out,
            validation_fraction=options.validation_fraction,
            shard_tokens=options.shard_tokens,
            ends=ends,
            max_tokens=options.max_tokens,
            workers=options.workers,
            part=options.stretch(),
            progress=progress,
        )
    print(_summary(folder, manifest, _separated(tokenizer, ends), options.part))
    return 0


def run_verify(args: list[str]) -> int:
    """Runs `recurjax data verify DIR`."""
    name = parse(VerifyOptions, args, prog="recurjax data verify").folder
    folder = prepared_here(name)
    # Three checks: the files' checksums, records that make up the stream, a tokenizer
    # that is the one of the manifest.
    manifest = read_manifest(folder)
    verify_checksums(folder)
    PreparedStream(folder, manifest)  # counts of records, and the index
    # As the folder was named: of one in a store its own is loaded, not the copy.
    tokenizer = f"{name.rstrip('/')}/{TOKENIZER}"
    if load_tokenizer(tokenizer).hash != manifest.tokenizer_hash:
        raise UserError(f"{tokenizer} did not make the tokens: prepare the data again")
    print(
        f"{name} is complete: {manifest.tokens:,} tokens of {manifest.documents:,} "
        f"documents in {len(manifest.shards)} shards"
    )
    return 0


def run_show(args: list[str]) -> int:
    """Runs `recurjax data show DIR`."""
    options = parse(ShowOptions, args, prog="recurjax data show")
    folder = prepared_here(options.folder)
    manifest = read_manifest(folder)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    stream = PreparedStream(folder, manifest)
    last = (stream.tokens - 1) // options.length
    if options.first > last:
        raise UserError(
            f"--first {options.first}: the last row of {options.folder} is {last}"
        )
    # Short data have fewer rows than requested: show them all.
    for row in range(options.first, min(options.first + options.rows, last + 1)):
        start = row * options.length
        # The last row may be shorter.
        stop = min(start + options.length, stream.tokens)
        split = "train" if start < manifest.train_tokens else "validation"
        print(f"=== row {row}: tokens {start:,} to {stop - 1:,}, {split} ===")
        print(_shown(stream, tokenizer, start, stop))
    return 0


def _shown(stream: PreparedStream, tokenizer: Tokenizer, start: int, stop: int) -> str:
    """Returns a stretch of tokens as text: a line ||| where a document begins."""
    # Documents that begin within this row, which may itself begin inside one.
    first, last = np.searchsorted(stream.starts, [start, stop])
    begins = stream.starts[first:last].tolist()
    borders = [start, *(b for b in begins if b > start), stop]
    [ids] = stream.read([(start, stop)])
    # One token that is both is shown as BOS; a tokenizer may have neither.
    marks = ((tokenizer.eos, "<EOS>"), (tokenizer.bos, "<BOS>"))
    names = {token: name for token, name in marks if token is not None}
    pieces = []
    for begin, end in pairwise(borders):
        text, plain = "", []
        # Special tokens have no text: they are shown by name, the others decoded
        # together, as a character may span several tokens.
        for token in [*ids[begin - start : end - start].tolist(), None]:
            # None ends the row.
            if token is None or token in names:
                text += tokenizer.decode(plain)
                text += "" if token is None else names[token]
                plain = []
            else:
                plain.append(token)
        pieces.append(("||| " if begin in begins else "... ") + text)
    return "\n".join(pieces)


def _separated(tokenizer: Tokenizer, ends: bool | None) -> str:
    after = closing(tokenizer, ends)
    first = "" if tokenizer.bos is None else f"begins with token {tokenizer.bos}"
    last = f"ends with token {after[0]}" if after else ""
    separators = " and ".join(part for part in (first, last) if part)
    return (
        f"each document {separators}"
        if separators
        else "nothing separates the documents"
    )


def _summary(
    out: str, manifest: PreparedManifest, separated: str = "", part: str | None = None
) -> str:
    summary = (
        f"{out}: {manifest.documents:,} documents, {manifest.text_bytes:,} bytes, "
        f"{manifest.tokens:,} tokens of {manifest.vocabulary:,} in "
        f"{len(manifest.shards)} shards; {manifest.train_tokens:,} to train, "
        f"{manifest.validation_tokens:,} to validate\n"
    )
    summary += f"{separated}\n" if separated else ""
    if part is not None:
        return summary + f"part {part}: join all with recurjax data merge"
    return summary + (
        "in an experiment:\n"
        f'    DataConfig(corpus=Prepared(directory="{out}"),\n'
        f'               tokenizer=TokenizerFile(path="{out}/{TOKENIZER}"))\n'
        f"on the command line:\n    recurjax train quickstart --corpus {out}"
    )
