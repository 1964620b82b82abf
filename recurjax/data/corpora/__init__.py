"""Each kind of corpus as a stream of documents, and the files that patterns name."""

from recurjax.data.corpora.documents import (
    Conversation,
    CorpusReading,
    Document,
    Messages,
    embedded_text,
    read_conversations,
    read_corpus,
    read_messages,
)
from recurjax.data.corpora.files import names_below

__all__ = [
    "Conversation",
    "Document",
    "Messages",
    "CorpusReading",
    "embedded_text",
    "names_below",
    "read_conversations",
    "read_corpus",
    "read_messages",
]
