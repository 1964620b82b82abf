"""The entry point: opens a DataConfig and makes batches."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args, overload

import numpy as np
from jaxtyping import Float32, Int32

from recurjax.data.answers import AnswersDataset, open_answers
from recurjax.data.batches import Layout
from recurjax.data.config import (
    Bpe,
    DataConfig,
    Examples,
    Mixture,
    NanochatBpe,
    Prepared,
)
from recurjax.data.corpora import read_corpus
from recurjax.data.loader import ChainedLoader, Loader, RowsOfText
from recurjax.data.prepared import (
    TOKENIZER,
    PreparedStream,
    prepared_here,
    read_manifest,
)
from recurjax.data.streams import (
    MemoryStream,
    Split,
    TokenStream,
    byte_table,
    encoded_documents,
    validation_start,
)
from recurjax.data.tasks.dataset import TaskData, TaskDataset
from recurjax.data.tokenizers import Tokenizer, build_tokenizer
from recurjax.errors import UserError

SplitName = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class Dataset(RowsOfText):
    """A tokenized corpus, in memory or in a prepared directory.

    Attributes:
      config: what it was opened with.
      tokenizer: made its tokens.
      stream: all of its tokens.
      cut: the validation split begins at this token.
      fingerprint: SHA-256 of the tokens' identity and the tokenizer.
      text_scale: bytes of text for each byte of `byte_table`, of the documents that
        validation reads; 1 for tokenizers that keep every byte.
    """

    config: DataConfig
    tokenizer: Tokenizer
    stream: TokenStream
    cut: int
    fingerprint: str
    text_scale: float = 1.0

    @cached_property
    def token_bytes(self) -> Int32[np.ndarray, " V"] | Float32[np.ndarray, " V"]:
        """The bytes of text that each token counts for: they sum to the text's own.

        A tokenizer may put spaces before words, drop or fold letters; bits per byte
        compare tokenizers only over the bytes of the text itself.
        """
        return _scaled(byte_table(self.tokenizer), self.text_scale)

    def split(self, name: SplitName) -> Split:
        """Returns one part of the stream."""
        if name not in get_args(SplitName):
            raise ValueError(
                f"Dataset.split: name must be train or validation, got {name!r}"
            )
        # The split is one cut: everything before it is for training.
        start, stop = (0, self.cut) if name == "train" else (self.cut, None)
        stop = self.stream.tokens if stop is None else stop
        return Split(name=name, stream=self.stream, start=start, stop=stop)

    def tokens(self, name: SplitName) -> Int32[np.ndarray, " T"]:
        """Reads an entire split into memory."""
        split = self.split(name)
        return self.stream.read([(split.start, split.stop)])[0]

    def counted_bytes(self, name: SplitName) -> int:
        """Sums `byte_table` over a split's tokens; reads all of it."""
        # Four million tokens at a time: a prepared split may be larger than the memory.
        split, step = self.split(name), 1 << 22
        table, total = byte_table(self.tokenizer), 0
        for start in range(split.start, split.stop, step):
            [ids] = self.stream.read([(start, min(start + step, split.stop))])
            total += int(table[ids].sum(dtype=np.int64))
        return total

    def loader(
        self,
        split: SplitName,
        *,
        length: int,
        batch: int,
        rows: tuple[int, int] | None = None,
        seed: int | None = None,
        in_order: bool | None = None,
    ) -> Loader:
        """Returns batches of `batch` rows of `length` tokens.

        Those for training are endless and shuffled, those in order are one pass, with
        the last batch filled up with places whose target is IGNORED. Both are packed as
        the config says: concatenated rows in order have every token of the split,
        best-fit ones begin with a document and leave out what is cropped.

        Args:
          split: which part.
          length: T, in tokens.
          batch: rows of the global batch, over all processes.
          rows: (first, after the last) row that this process delivers; None: all. Any
            division of the rows among processes gives the same global batches.
          seed: None: the config's.
          in_order: None: for "validation" only.

        Raises:
          UserError: the split is too short, or the tokenizer has no BOS for best-fit.
        """
        # By default one process delivers all rows of the batch.
        rows = rows or (0, batch)
        if length < 1 or batch < 1:
            raise ValueError(
                "Dataset.loader: length and batch must be at least 1, got "
                f"{length} and {batch}"
            )
        if not 0 <= rows[0] < rows[1] <= batch:
            raise ValueError(
                f"Dataset.loader: rows must be within 0..{batch}, got {rows}"
            )
        # Check here: grain would raise the error later, in a thread.
        part = self.split(split)
        _check_long_enough(part, length)
        if in_order is None:
            in_order = split == "validation"
        if self.config.packing == "best_fit":
            # Shuffled packing never ends, and would pack one document with itself
            # forever.
            _check_packable(part, self.tokenizer, least=1 if in_order else 2)
        layout = Layout(
            length=length,
            batch=batch,
            rows=rows,
            segments=self.config.has_segments,
        )
        seed = self.config.seed if seed is None else seed
        return Loader(
            parts=(part,),
            config=self.config,
            layout=layout,
            in_order=in_order,
            seed=seed,
            fingerprint=self.fingerprint,
        )


@dataclass(frozen=True, kw_only=True)
class MixtureDataset(RowsOfText):
    """The parts of a mixture; the counterpart of `recurjax.data.dataset.Dataset`.

    Attributes:
      config: what it was opened with; its corpus is a Mixture.
      tokenizer: the tokenizer of all parts.
      parts: by their names, in the mixture's order.
      fingerprint: SHA-256 of the parts' fingerprints and all weights.
    """

    config: DataConfig
    tokenizer: Tokenizer
    parts: Mapping[str, Dataset]
    fingerprint: str

    @cached_property
    def token_bytes(self) -> Int32[np.ndarray, " V"] | Float32[np.ndarray, " V"]:
        """The bytes of text that each token counts for over all validation splits.

        Of one part's text they are those of the part.
        """
        scales = {part.text_scale for part in self.parts.values()}
        scale = scales.pop()
        if scales:  # a lossy tokenizer loses more of one part than of another
            counted = [p.counted_bytes("validation") for p in self.parts.values()]
            scale = _ratio(
                sum(
                    part.text_scale * size
                    for part, size in zip(self.parts.values(), counted, strict=True)
                ),
                sum(counted),
            )
        return _scaled(byte_table(self.tokenizer), scale)

    def loader(
        self,
        split: SplitName,
        *,
        length: int,
        batch: int,
        rows: tuple[int, int] | None = None,
        seed: int | None = None,
        in_order: bool | None = None,
    ) -> Loader | ChainedLoader:
        """Returns batches of `batch` rows, each row of one part.

        Row n of the mixture is the next row of the part whose turn it is, and that
        part's rows are those that it would give alone, in the same order. In order
        there are no shares: one part comes after the other, in batches of its own.

        Args and errors are those of `Dataset.loader`.
        """
        if in_order is None:
            in_order = split == "validation"
        loaders = {}
        for name, part in self.parts.items():
            # The parts' errors do not know which part they are of.
            try:
                loaders[name] = part.loader(
                    split,
                    length=length,
                    batch=batch,
                    rows=rows,
                    seed=seed,
                    in_order=in_order,
                )
            except UserError as error:  # too short, say
                raise UserError(f"part {name} of the mixture: {error}") from error
        # A pass in order is for losses of each part, so nothing is mixed.
        if in_order:
            return ChainedLoader(parts=loaders)
        mixture = self.config.corpus
        assert isinstance(mixture, Mixture)
        changes = [(change.step, change.weights) for change in mixture.reweightings]
        # All parts have the mixture's layout, seed and packing.
        return replace(
            next(iter(loaders.values())),
            parts=tuple(part for loader in loaders.values() for part in loader.parts),
            weights=((0, tuple(part.weight for part in mixture.parts)), *changes),
            fingerprint=self.fingerprint,
        )


AnyDataset = Dataset | MixtureDataset | AnswersDataset | TaskDataset
"""What `open_dataset` gives: their tokenizers and loaders are alike."""


def lossy_note(dataset: AnyDataset) -> str | None:
    """Returns a message if a tokenizer's tokens are not the text's bytes, or None."""
    texts = dataset.parts.values() if isinstance(dataset, MixtureDataset) else [dataset]
    scales = [text.text_scale for text in texts if isinstance(text, Dataset)]
    if all(scale == 1.0 for scale in scales):
        return None
    most = max(scales, key=lambda scale: abs(scale - 1))
    return (
        "the tokenizer does not keep every byte (spaces it adds, letters it folds or "
        f"does not know): {1 / most:.3f} bytes of its tokens for each of the text; "
        "bits per byte count the text's own"
    )


@overload
def open_dataset(  # Of other corpora than one text it is another class, used alike.
    config: DataConfig, *, tokenizer: Tokenizer | None = None
) -> Dataset: ...


@overload
def open_dataset(
    config: TaskData, *, tokenizer: Tokenizer | None = None
) -> TaskDataset: ...


def open_dataset(
    config: DataConfig | TaskData, *, tokenizer: Tokenizer | None = None
) -> AnyDataset:
    """Opens a corpus: reads and tokenizes it, or opens the prepared shards; or a task.

    Args:
      config: what to open.
      tokenizer: takes the place of the config's, for a run that carries its own.

    Raises:
      UserError: the corpus or the tokenizer is missing, empty, damaged, or the two do
        not match.
    """
    # The config's class decides; every kind of data set has a tokenizer and loaders.
    if isinstance(config, TaskData):  # its tokens are its own
        return TaskDataset(config=config)
    if isinstance(config.corpus, Prepared):
        return _open_prepared(config, config.corpus, tokenizer)
    if isinstance(config.corpus, Mixture):
        return _open_mixture(config, config.corpus, tokenizer)
    if isinstance(config.corpus, Examples):
        tokenizer = tokenizer or build_tokenizer(
            config.tokenizer, config.corpus, validation_fraction=config.held_out
        )
        return open_answers(config, tokenizer)
    return _open_text(config, tokenizer)


def _open_text(config: DataConfig, tokenizer: Tokenizer | None) -> Dataset:
    tokenizer = tokenizer or build_tokenizer(
        config.tokenizer, config.corpus, validation_fraction=config.held_out
    )
    documents = list(encoded_documents(read_corpus(config.corpus), tokenizer))
    stream = MemoryStream(
        [document.ids for document in documents], vocabulary=tokenizer.vocabulary
    )
    cut = validation_start(
        stream,
        document_bytes=np.array([d.table_bytes for d in documents], np.int64),
        tokenizer=tokenizer,
        fraction=config.held_out,
    )
    # The tokens themselves, not the files: the same text in other files is the same
    # data, and a checkpoint's place in it stays good.
    identity = [tokenizer.hash, stream.sha256(), cut]
    ends = np.cumsum([len(document.ids) for document in documents])
    read = [d for d, end in zip(documents, ends, strict=True) if end > cut] or documents
    return Dataset(
        config=config,
        tokenizer=tokenizer,
        stream=stream,
        cut=cut,
        fingerprint=_sha256_of(identity),
        text_scale=_ratio(
            sum(document.text_bytes for document in read),
            sum(document.counted_bytes for document in read),
        ),
    )


def _open_mixture(
    config: DataConfig, mixture: Mixture, tokenizer: Tokenizer | None
) -> MixtureDataset:
    if tokenizer is None:
        tokenizer = _shared_tokenizer(config, mixture)
    parts: dict[str, Dataset] = {}
    for part in mixture.parts:
        single = replace(config, corpus=part.corpus)
        try:
            if isinstance(part.corpus, Prepared):
                parts[part.name] = _open_prepared(single, part.corpus, tokenizer)
            else:
                parts[part.name] = _open_text(single, tokenizer)
        except UserError as error:
            raise UserError(f"part {part.name} of the mixture: {error}") from error
    # A position depends on the weights: with others it means other rows.
    weights = [part.weight for part in mixture.parts]
    later = [[change.step, *change.weights] for change in mixture.reweightings]
    known = [[name, part.fingerprint] for name, part in parts.items()]
    return MixtureDataset(
        config=config,
        tokenizer=tokenizer,
        parts=parts,
        fingerprint=_sha256_of([known, weights, later]),
    )


def _shared_tokenizer(config: DataConfig, mixture: Mixture) -> Tokenizer:
    if isinstance(config.tokenizer, Bpe | NanochatBpe):
        raise UserError(
            f"data.tokenizer: {type(config.tokenizer).__name__} cannot be "
            "trained on a mixture: train it on one part with `recurjax data "
            "prepare` and use TokenizerFile(path=...)"
        )
    return build_tokenizer(config.tokenizer, mixture, validation_fraction=0.0)


def _open_prepared(
    config: DataConfig, corpus: Prepared, tokenizer: Tokenizer | None
) -> Dataset:
    directory, folder = corpus.directory, prepared_here(corpus.directory)
    manifest = read_manifest(folder)
    if tokenizer is None and isinstance(config.tokenizer, Bpe | NanochatBpe):
        raise UserError(
            f"{directory} holds tokens already, so "
            f"{type(config.tokenizer).__name__} cannot be trained: use its own "
            f'tokenizer, TokenizerFile(path="{directory}/{TOKENIZER}")'
        )
    tokenizer = tokenizer or build_tokenizer(
        config.tokenizer, corpus, validation_fraction=manifest.validation_fraction
    )
    if tokenizer.hash != manifest.tokenizer_hash:
        raise UserError(
            f"{directory} was prepared with another tokenizer (hash "
            f"{manifest.tokenizer_hash[:12]}, the configured one has "
            f'{tokenizer.hash[:12]}): use TokenizerFile(path="{directory}/{TOKENIZER}")'
        )
    if config.validation_fraction not in (None, manifest.validation_fraction):
        raise UserError(
            f"{directory} was prepared with validation_fraction "
            f"{manifest.validation_fraction}, the config has "
            f"{config.validation_fraction}: leave it out or prepare the data "
            "again"
        )
    # Hash the shards' checksums, which saves reading the tokens.
    shards = [shard.sha256 for shard in manifest.shards]
    return Dataset(
        config=config,
        tokenizer=tokenizer,
        stream=PreparedStream(folder, manifest),
        cut=manifest.train_tokens,
        fingerprint=_sha256_of([tokenizer.hash, *shards, manifest.train_tokens]),
        text_scale=_ratio(manifest.text_bytes, manifest.counted_bytes),
    )


def _scaled(
    table: Int32[np.ndarray, " V"], scale: float
) -> Int32[np.ndarray, " V"] | Float32[np.ndarray, " V"]:
    return table if scale == 1.0 else (table * scale).astype(np.float32)


def _ratio(text: int | float, counted: int) -> float:
    # 0: there is no text, or an earlier version did not count.
    return text / counted if counted else 1.0


def _check_long_enough(part: Split, length: int) -> None:
    # A training row has a target for its last token; a validation row is filled up.
    needed = length + 1 if part.name == "train" else 2
    if part.tokens < needed:
        raise UserError(
            f"the {part.name} split has {part.tokens} tokens and a row of "
            f"length {length} needs {needed}: use more text, a shorter length "
            "or another validation_fraction"
        )


def _check_packable(part: Split, tokenizer: Tokenizer, *, least: int) -> None:
    if tokenizer.bos is None:
        raise UserError(
            "data.packing best_fit needs a tokenizer with BOS: use one that "
            "has it, or packing concat"
        )
    count = len(part.document_starts())
    if count < least:
        raise UserError(
            f"data.packing best_fit needs at least {least} documents in the "
            f"{part.name} split, which has {count}: use packing concat or "
            "another validation_fraction"
        )


def _sha256_of(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
