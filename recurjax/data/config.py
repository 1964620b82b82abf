"""Configs of the training data: corpus, tokenizer, and the layout of rows."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from recurjax.data.shares import whole_numbers
from recurjax.errors import UserError
from recurjax.ranges import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    RangeChecks,
    Seed,
    check_ranges,
)

# More only fills the memory.
Prefetch = Annotated[int, Range(least=0, most=1024)]
Threads = Annotated[int, Range(least=1, most=1024)]

_TrainBytes = Annotated[int, Range(least=1, below=2**63)]
_LARGEST_BPE = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedText:
    """The Shakespeare text that comes with the package, as one document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """UTF-8 text files (`.gz` too), named by paths or glob patterns.

    Attributes:
      patterns: paths or globs, read in this order; the matches of one glob in sorted
        order.
      separator: the string between two documents of a file; None: each file is one
        document.
    """

    patterns: tuple[str, ...]
    separator: str | None = None

    def __post_init__(self):
        _require_patterns(self, self.patterns)
        if self.separator == "":
            raise UserError(
                "TextFiles: separator must be None or at least one character, got ''"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines:
    """Files with one JSON object per line (`.gz` too).

    Attributes:
      patterns: paths or globs.
      field: the field with the text.
    """

    patterns: tuple[str, ...]
    field: str = "text"

    def __post_init__(self):
        _require_patterns(self, self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parquet:
    """Parquet files, one document per row.

    Attributes:
      patterns: paths or globs.
      field: the column with the text.
    """

    patterns: tuple[str, ...]
    field: str = "text"

    def __post_init__(self):
        _require_patterns(self, self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRecords:
    """ArrayRecord files whose records are documents in UTF-8.

    Attributes:
      patterns: paths or globs.
    """

    patterns: tuple[str, ...]

    def __post_init__(self):
        _require_patterns(self, self.patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tfds:
    """A data set that tensorflow-datasets has prepared as ArrayRecord files.

    Attributes:
      directory: the folder of one version, with dataset_info.json inside.
      split: name of the split to read; `validation_fraction` divides it again.
      field: the feature with the text.
    """

    directory: str
    split: str = "train"
    field: str = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Token shards written by `recurjax data prepare`.

    Attributes:
      directory: the folder that it wrote. Shards of a bucket (gs://, s3://) are copied
        to the user's cache when they are first read.
    """

    directory: str


PartCorpus = (
    EmbeddedText | TextFiles | JsonLines | Parquet | ArrayRecords | Tfds | Prepared
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One corpus of a mixture.

    Attributes:
      corpus: text or prepared; all parts of a mixture share one tokenizer.
      weight: share of the rows, relative to the other parts' weights.
      name: name in metrics: letters, digits, "_" and "-".
    """

    corpus: PartCorpus
    weight: PositiveFloat
    name: str

    def __post_init__(self):
        check_ranges(self)
        if not re.fullmatch(r"[\w-]+", self.name):
            raise UserError(
                f"Part: name must have letters, digits, _ and -, got {self.name!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reweighting(RangeChecks):
    """New weights of a mixture's parts from a step on.

    Attributes:
      step: the first training step with these weights.
      weights: weights of all parts, in their order; 0 leaves a part out from this step
        on.
    """

    step: PositiveInt
    weights: tuple[NonNegativeFloat, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Rows drawn from several corpora in fixed shares.

    After any number of rows each part has had its share of them, to within one row per
    reweighting. Each part is shuffled and repeated independently, as it would be alone.
    Validation reads all parts' validation splits and reports a loss for each.

    Attributes:
      parts: the corpora, with names and weights.
      reweightings: new weights from later steps on, in the order of the steps, such as
        for an anneal at the end.
    """

    parts: tuple[Part, ...]
    reweightings: tuple[Reweighting, ...] = ()

    def __post_init__(self):
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise UserError(
                "Mixture: needs at least one part, each with a unique name, got "
                f"{', '.join(names) or 'none'}"
            )
        last = 0
        for change in self.reweightings:
            if change.step <= last:
                raise UserError(
                    f"Mixture: reweightings must have ascending steps, got "
                    f"{change.step} after {last}"
                )
            last = change.step
            if len(change.weights) != len(names) or not any(change.weights):
                raise UserError(
                    f"Mixture: the reweighting at step {change.step} must have "
                    f"{len(names)} weights, not all 0, got {change.weights}"
                )
        # Shares must be ratios of integers: check here, before a run has a directory.
        for weights in (
            tuple(part.weight for part in self.parts),
            *(change.weights for change in self.reweightings),
        ):
            whole_numbers(weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptAnswer:
    """Prompts with answers, one JSON object per line (`.gz` too); loss on the answers.

    An example that is longer than a row loses the middle of its prompt and keeps its
    beginning and end, as in RAT's fine-tuning. An epoch is every example once.

    Attributes:
      patterns: paths or globs.
      prompt: the field with the prompt.
      answer: the field with the answer. Both texts are joined without a separator, so a
        space between them is part of one of them. A line may have `messages` instead:
        objects with role and content, the last one the assistant's answer.
      template: path of a Jinja file that formats a conversation, such as a tokenizer's
        chat template, and needs pip install jinja2; BOS is inserted where it writes
        one. None: BOS, if the tokenizer has one, and one line "role: content" per
        message.
      rows: "one": one example per row, padded; "packed": as many as fit, which do not
        attend to each other.
      loss: "answer": on the answer's tokens and on the EOS that ends it; "all": on the
        prompt's tokens too, but for its first and the one after a lost middle.
    """

    patterns: tuple[str, ...]
    prompt: str = "prompt"
    answer: str = "answer"
    template: str | None = None
    rows: Literal["one", "packed"] = "one"
    loss: Literal["answer", "all"] = "answer"

    def __post_init__(self):
        _require_patterns(self, self.patterns)
        _require_choice(self, "rows", ("one", "packed"))
        _require_choice(self, "loss", ("answer", "all"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversations:
    """Conversations with an assistant, one per line or Parquet row.

    Loss counts on the assistant's messages and on the token that ends each of its
    turns, but not on what the template writes around them. A conversation that is
    longer than a row loses its end. If its beginning leaves the answer less than half
    of the row, the beginning loses its middle. An epoch is every conversation once.

    Attributes:
      patterns: paths or globs of JSON lines (`.gz` too) or of .parquet files.
      field: the field with the messages, objects with role and content.
      template: path of a Jinja file that formats a conversation, and needs pip install
        jinja2; None: the tokenizer's chat template.
      rows: "packed": as many conversations as fit into a row, which do not attend to
        each other; "one": one per row, padded.
    """

    patterns: tuple[str, ...]
    field: str = "messages"
    template: str | None = None
    rows: Literal["one", "packed"] = "packed"

    def __post_init__(self):
        _require_patterns(self, self.patterns)
        _require_choice(self, "rows", ("one", "packed"))


Examples = PromptAnswer | Conversations

Corpus = PartCorpus | Mixture | PromptAnswer | Conversations


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """UTF-8 bytes 0..255 and, if `bos`, a token 256 that begins documents.

    Attributes:
      bos: put the token 256 before documents.
    """

    bos: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Bpe(RangeChecks):
    """A byte-level BPE trained on the training part of the corpus.

    Attributes:
      vocabulary: number of tokens: 256 bytes, one BOS and the merges.
      train_bytes: about the most bytes of text on which merges are counted.
    """

    vocabulary: Annotated[int, Range(least=257, most=_LARGEST_BPE)]
    train_bytes: _TrainBytes = 200_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class NanochatBpe(RangeChecks):
    """nanochat's byte-level BPE, trained on the training part of the corpus.

    Attributes:
      vocabulary: number of tokens: 256 bytes, the merges and nine special tokens, of
        which the first is BOS.
      train_bytes: about the most bytes of text on which merges are counted, of the
        first 10,000 characters of each document.
    """

    vocabulary: Annotated[int, Range(least=265, most=_LARGEST_BPE)]
    train_bytes: _TrainBytes = 2_000_000_000


NONE = "none"
"""In the place of a special token's name: there is no such token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFile:
    """A tokenizer on disk.

    Attributes:
      path: a tokenizer.json, or a folder that holds a tokenizer (such as `tokenizer` in
        a prepared directory, or a Hugging Face model's folder).
      bos: the token that begins each document and prompt, "none" for none; None: the
        token that the file's post-processor puts there, if any.
      eos: the token that ends generated text, and each document if there is no BOS;
        None: the one of tokenizer_config.json next to the file, else the first
        well-known name in the vocabulary.
    """

    path: str
    bos: str | None = None
    eos: str | None = None


TokenizerConfig = Bytes | Bpe | NanochatBpe | TokenizerFile


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Corpus, tokenizer and the way documents are laid out in rows.

    Attributes:
      corpus: the text, prompts with answers, or conversations to train on.
      tokenizer: the tokenizer, whose vocabulary the model has.
      packing: "concat" cuts the concatenated documents into rows; "best_fit" starts
        each row with BOS and fills it with the largest documents that fit.
      document_segments: keep the documents of a row from attending to each other.
      validation_fraction: share of the corpus, from its end, that is held out for
        validation: of its bytes, or of the examples of prompts and conversations. None:
        the share with which a prepared corpus was prepared, else 0.1.
      seed: seed of the global shuffle, which is another permutation in each epoch.
      packing_buffer: documents, at least, that best-fit packing chooses from.
      prefetch: batches that are prepared in advance; 0: each on demand.
      threads: threads that prepare batches; best-fit packing uses one.
    """

    corpus: Corpus
    tokenizer: TokenizerConfig
    packing: Literal["concat", "best_fit"] = "concat"
    document_segments: bool = False
    validation_fraction: Fraction | None = None
    seed: Seed = 0
    packing_buffer: Annotated[int, Range(least=1, most=2**24)] = 1000
    prefetch: Prefetch = 8
    threads: Threads = 2

    def __post_init__(self):
        check_ranges(self)
        if self.packing not in ("concat", "best_fit"):
            raise UserError(
                f"data: packing must be concat or best_fit, got {self.packing!r}"
            )
        # Both lay out documents; examples lay themselves out by `rows`.
        packed = self.packing != "concat" or self.document_segments
        if isinstance(self.corpus, Examples) and packed:
            raise UserError(
                f"data: {type(self.corpus).__name__} packs examples by its field "
                "rows: leave packing and document_segments out"
            )

    @property
    def has_segments(self) -> bool:
        """Whether batches carry segment ids for the documents of a row."""
        corpus = self.corpus
        return self.document_segments or (
            isinstance(corpus, Examples) and corpus.rows == "packed"
        )

    @property
    def held_out(self) -> float:
        """The share kept for validation of a corpus that is not prepared."""
        return 0.1 if self.validation_fraction is None else self.validation_fraction


def _require_patterns(corpus: object, patterns: tuple[str, ...]) -> None:
    """Refuses patterns that name no file."""
    # One string would be read as a list of patterns of one letter each.
    if isinstance(patterns, str) or not patterns or not all(patterns):
        raise UserError(
            f"{type(corpus).__name__}: patterns must name at least one file or glob, "
            f"got {patterns!r}"
        )


def _require_choice(corpus: object, field: str, choices: tuple[str, ...]) -> None:
    value = getattr(corpus, field)
    if value not in choices:
        raise UserError(
            f"{type(corpus).__name__}: {field} must be {' or '.join(choices)}, got "
            f"{value!r}"
        )
