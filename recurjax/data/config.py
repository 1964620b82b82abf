"""What to train on: the corpus, the tokenizer, and how documents become rows."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from recurjax.data.examples import (
    Conversations,
    Examples,
    PromptAnswer,
    require_patterns,
)
from recurjax.data.shares import whole_numbers
from recurjax.errors import UserError
from recurjax.ranges import require_numbers, require_range

MOST_AHEAD = 1024
"""Batches made ahead, and threads that make them: more only fills the memory."""

_LARGEST_BPE = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedText:
    """The Shakespeare text that comes with the package, as one document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """UTF-8 text files (`.gz` too), named by paths or glob patterns.

    Attributes:
      patterns: read in this order; the matches of one pattern in sorted order.
      separator: the string between two documents of a file; None: a file is one.
    """

    patterns: tuple[str, ...]
    separator: str | None = None

    def __post_init__(self):
        require_patterns(self, self.patterns)
        if self.separator == "":
            raise UserError("TextFiles: separator must not be the empty string")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines:
    """Files with one JSON object a line (`.gz` too); `field` holds the text."""

    patterns: tuple[str, ...]
    field: str = "text"

    def __post_init__(self):
        require_patterns(self, self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parquet:
    """Parquet files, one document a row, in the column `field`."""

    patterns: tuple[str, ...]
    field: str = "text"

    def __post_init__(self):
        require_patterns(self, self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRecords:
    """ArrayRecord files whose records are documents in UTF-8."""

    patterns: tuple[str, ...]

    def __post_init__(self):
        require_patterns(self, self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tfds:
    """A data set that tensorflow-datasets has prepared as ArrayRecord files.

    Attributes:
      directory: the folder of one version, with dataset_info.json inside.
      split: the split's name in that data set; `validation_fraction` cuts it again.
      field: the text feature.
    """

    directory: str
    split: str = "train"
    field: str = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Token shards written by `recurjax data prepare`.

    Attributes:
      directory: a folder, also of a store (gs://, s3://), whose shards are then copied
        into the user's cache when they are first read.
    """

    directory: str


PartCorpus = (
    EmbeddedText | TextFiles | JsonLines | Parquet | ArrayRecords | Tfds | Prepared
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One corpus of a mixture.

    Attributes:
      corpus: text or prepared; all parts of a mixture have the one tokenizer.
      weight: its share of the rows, relative to the other parts' weights.
      name: in metrics, letters, digits, "_" and "-".
    """

    corpus: PartCorpus
    weight: float
    name: str

    def __post_init__(self):
        require_numbers(self)
        if not re.fullmatch(r"[\w-]+", self.name):
            raise UserError(
                f"Part: name must have letters, digits, _ and -, got {self.name!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reweighting:
    """Other weights of a mixture's parts, from a step on.

    Attributes:
      step: the first training step with these weights.
      weights: of all parts, in their order; 0 leaves a part out from here on.
    """

    step: int
    weights: tuple[float, ...]

    def __post_init__(self):
        # Whether the weights fit the parts is asked by the mixture, which knows them.
        require_numbers(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Rows drawn from several corpora in fixed shares.

    After any number of rows each part has had its share of them, to within one row for
    each reweighting so far. Each part is shuffled and begins anew by itself, as it
    would alone; validation is all parts' validation, with a loss for each.

    Attributes:
      parts: with names of their own.
      reweightings: in the order of their steps, such as for an anneal at the end.
    """

    parts: tuple[Part, ...]
    reweightings: tuple[Reweighting, ...] = ()

    def __post_init__(self):
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise UserError(
                "Mixture: wants parts, each with a name of its own, got "
                f"{', '.join(names) or 'none'}"
            )
        for part in self.parts:
            if not 0 < part.weight < math.inf:
                raise UserError(
                    f"Mixture: the weight of part {part.name} must be positive, got "
                    f"{part.weight}: leave the part out"
                )
        # Step 0 has the parts' own weights: reweightings come after it.
        last = 0
        for one in self.reweightings:
            if one.step <= last:
                raise UserError(
                    f"Mixture: reweightings must have ascending steps from 1 on, got "
                    f"{one.step} after {last}"
                )
            last = one.step
            known = len(one.weights) == len(names)
            if not known or min(one.weights) < 0 or not 0 < sum(one.weights) < math.inf:
                raise UserError(
                    f"Mixture: the reweighting at step {one.step} must have "
                    f"{len(names)} weights, none negative and not all 0, got "
                    f"{one.weights}"
                )
        # Rows are planned by whole numbers: told here, before a run has a directory.
        for weights in (
            tuple(part.weight for part in self.parts),
            *(one.weights for one in self.reweightings),
        ):
            whole_numbers(weights)


Corpus = PartCorpus | Mixture | PromptAnswer | Conversations


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """UTF-8 bytes 0..255 and, unless `bos` is False, the token 256 before documents."""

    bos: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Bpe:
    """A byte-level BPE trained on the training part of the corpus.

    Attributes:
      vocabulary: tokens in all: 256 bytes, one BOS, the rest merges.
      train_bytes: merges are counted on at most about this much text.
    """

    vocabulary: int
    train_bytes: int = 200_000_000

    def __post_init__(self):
        require_numbers(self)
        require_range(self, "vocabulary", most=_LARGEST_BPE)
        _require_size(self, self.vocabulary, 257, "256 bytes and BOS")
        _require_text(self, self.train_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class NanochatBpe:
    """nanochat's byte-level BPE, trained on the training part of the corpus.

    Attributes:
      vocabulary: tokens in all: 256 bytes, the merges, nine special tokens, of which
        the first is BOS.
      train_bytes: merges are counted on at most about this much text, of each document
        its first 10,000 characters.
    """

    vocabulary: int
    train_bytes: int = 2_000_000_000

    def __post_init__(self):
        require_numbers(self)
        require_range(self, "vocabulary", most=_LARGEST_BPE)
        _require_size(self, self.vocabulary, 265, "256 bytes and 9 special tokens")
        _require_text(self, self.train_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFile:
    """A tokenizer on disk.

    Attributes:
      path: a tokenizer.json, or a folder that holds a tokenizer (such as `tokenizer`
        in a prepared directory, or a Hugging Face model's folder).
      bos: the token before each document, "none" for none; None: what
        tokenizer_config.json beside the file says, else the first well-known name in
        the vocabulary, else none.
      eos: the token that ends generated text, and each document where there is no
        BOS; found the same way.
    """

    path: str
    bos: str | None = None
    eos: str | None = None


TokenizerConfig = Bytes | Bpe | NanochatBpe | TokenizerFile


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Corpus, tokenizer and the way documents are laid out in rows.

    Attributes:
      packing: "concat" cuts the joined documents into rows; "best_fit" starts each
        row with BOS and fills it with the largest documents that fit.
      document_segments: whether batches carry each position's document number.
      validation_fraction: the last share of the corpus' bytes, kept for validation.
        None: a prepared corpus brings the share that it was prepared with; of any
        other corpus 0.1; of prompts with answers a share of the examples.
      seed: of the global shuffle, another permutation each epoch.
      packing_buffer: documents that best-fit packing chooses from, at least.
      prefetch: batches made ahead of time; 0 makes each when it is asked for.
      threads: that make them (best-fit packing uses one).
    """

    corpus: Corpus
    tokenizer: TokenizerConfig
    packing: Literal["concat", "best_fit"] = "concat"
    document_segments: bool = False
    validation_fraction: float | None = None
    seed: int = 0
    packing_buffer: int = 1000
    prefetch: int = 8
    threads: int = 2

    def __post_init__(self):
        require_numbers(self)
        if self.packing not in ("concat", "best_fit"):
            raise UserError(
                f"data: packing must be concat or best_fit, got {self.packing!r}"
            )
        if not 0.0 <= self.held_out <= 1.0:
            raise UserError(
                "data: validation_fraction must lie between 0 and 1, "
                f"got {self.validation_fraction}"
            )
        # What the generator of the shuffle takes as a seed.
        if not 0 <= self.seed < 2**32:
            raise UserError(f"data: seed must lie in [0, 2**32), got {self.seed}")
        require_range(self, "prefetch", "threads", most=MOST_AHEAD)
        require_range(self, "packing_buffer", most=2**24)
        for name, least in (("packing_buffer", 1), ("prefetch", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise UserError(
                    f"data: {name} must be at least {least}, got {getattr(self, name)}"
                )
        # Both lay out documents; an example has a prompt and an answer besides.
        packed = self.packing != "concat" or self.document_segments
        if isinstance(self.corpus, Examples) and packed:
            raise UserError(
                f"data: {type(self.corpus).__name__} says by its own rows how examples "
                "are laid out: leave packing and document_segments out"
            )

    @property
    def has_segments(self) -> bool:
        """Whether batches carry numbers by which a row's documents are told apart."""
        corpus = self.corpus
        return self.document_segments or (
            isinstance(corpus, Examples) and corpus.rows == "packed"
        )

    @property
    def held_out(self) -> float:
        """The share kept for validation of a corpus that is not prepared."""
        return 0.1 if self.validation_fraction is None else self.validation_fraction


def _require_size(tokenizer: object, vocabulary: int, least: int, why: str) -> None:
    if vocabulary < least:
        raise UserError(
            f"{type(tokenizer).__name__}: vocabulary must be at least {least} ({why}), "
            f"got {vocabulary}"
        )


def _require_text(tokenizer: object, train_bytes: int) -> None:
    if train_bytes < 1:
        raise UserError(
            f"{type(tokenizer).__name__}: train_bytes must be positive, got "
            f"{train_bytes}"
        )
