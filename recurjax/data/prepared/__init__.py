"""A corpus tokenized once: writing, joining, reading and checking its shards."""

from recurjax.data.prepared.directory import (
    MANIFEST,
    TOKENIZER,
    PreparedManifest,
    PreparedStream,
    prepared_here,
    read_manifest,
    verify_checksums,
)
from recurjax.data.prepared.progress import shown_progress
from recurjax.data.prepared.writing import merge, prepare

__all__ = [
    "MANIFEST",
    "PreparedManifest",
    "PreparedStream",
    "TOKENIZER",
    "merge",
    "prepare",
    "prepared_here",
    "read_manifest",
    "shown_progress",
    "verify_checksums",
]
