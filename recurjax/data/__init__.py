"""Text to batches: corpora, tokenizers, packing and the grain pipeline.

The package exports the configs; `recurjax.data.dataset.open_dataset` turns one into
batches. A trainer needs nothing else. Importing this package does not import grain.
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
