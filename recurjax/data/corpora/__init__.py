"""Each kind of corpus as a stream of documents, and the files that patterns name."""

from recurjax.data.corpora.documents import (
    Document,
    Messages,
    Reading,
    embedded_text,
    read_corpus,
    read_messages,
)
from recurjax.data.corpora.files import names_below

__all__ = [
    "Document",
    "Messages",
    "Reading",
    "embedded_text",
    "names_below",
    "read_corpus",
    "read_messages",
]
