"""Text to batches: corpora, tokenizers, packing and the grain pipeline.

The configs are here; `recurjax.data.dataset.open_dataset` is the way in, and the only
module that a trainer needs beside them. Importing this package imports no grain.
"""

from recurjax.data.config import (
    ArrayRecords,
    Bpe,
    Bytes,
    Conversations,
    Corpus,
    DataConfig,
    EmbeddedText,
    JsonLines,
    Mixture,
    NanochatBpe,
    Parquet,
    Part,
    Prepared,
    PromptAnswer,
    Reweighting,
    TextFiles,
    Tfds,
    TokenizerConfig,
    TokenizerFile,
)

__all__ = [
    "ArrayRecords",
    "Bpe",
    "Bytes",
    "Conversations",
    "Corpus",
    "DataConfig",
    "EmbeddedText",
    "JsonLines",
    "Mixture",
    "NanochatBpe",
    "Parquet",
    "Part",
    "Prepared",
    "PromptAnswer",
    "Reweighting",
    "TextFiles",
    "Tfds",
    "TokenizerConfig",
    "TokenizerFile",
]
