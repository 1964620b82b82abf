"""Turns each kind of corpus into a stream of documents, read as they are needed."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import IO, Any, NamedTuple, assert_never, cast

from recurjax.data.config import (
    ArrayRecords,
    Conversations,
    Corpus,
    EmbeddedText,
    JsonLines,
    Mixture,
    Parquet,
    Prepared,
    PromptAnswer,
    TextFiles,
    Tfds,
)
from recurjax.data.corpora.files import CorpusFile, matching_files, null_in
from recurjax.errors import UserError, first_few


class Document(NamedTuple):
    """One text, and where it ends in the corpus, in units of `CorpusReading.total`."""

    text: str
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusReading:
    """One pass over a corpus; `total` is its size in bytes on disk or in records."""

    total: int
    documents: Iterator[Document]


def read_corpus(corpus: Corpus) -> CorpusReading:
    """Opens a corpus; empty documents are left out.

    Raises:
      UserError: a pattern matches no file, a file cannot be read or lacks the field, a
        package for the format is not installed; while iterating: text that is not
        UTF-8, or no text in the corpus.
    """
    match corpus:
        case EmbeddedText():
            # ASCII: characters and bytes are the same count.
            text = embedded_text()
            total, documents = len(text), iter((Document(text, len(text)),))
        case TextFiles():
            total, documents = _per_file(corpus.patterns, _text_documents, corpus)
        case JsonLines():
            total, documents = _per_file(corpus.patterns, _json_documents, corpus)
        case Parquet() | ArrayRecords() | Tfds():
            from recurjax.data.corpora import records  # needs grain, pyarrow, tfds

            total, pairs = records.read_records(corpus)
            documents = (Document(text, done) for text, done in pairs)
        case PromptAnswer():
            total, documents = _per_file(corpus.patterns, _prompted_documents, corpus)
        case Conversations():
            talks = list(read_conversations(corpus))
            total, documents = len(talks), _documents(talks)
        # Tokens cannot be turned back into the text that another tokenizer would need.
        case Prepared():
            raise UserError(
                f"{corpus.directory} holds tokens, not text: name the text that it "
                "was prepared from"
            )
        case Mixture():
            raise UserError(
                "a mixture has no single text to read: name one of its parts, or "
                "a tokenizer from disk, such as `recurjax data prepare` writes"
            )
        case _:
            assert_never(corpus)
    return CorpusReading(total=total, documents=_with_text(documents, corpus))


class Conversation(NamedTuple):
    """Messages with role and content, and their place for error messages."""

    messages: tuple[dict[str, str], ...]
    where: str


class Messages(NamedTuple):
    """The texts of a line: the prompt, as messages with a role each, and the answer."""

    prompt: tuple[tuple[str, str], ...]
    answer: str


def read_messages(corpus: PromptAnswer) -> Iterator[Messages]:
    """Reads prompts with answers; a plain prompt is a message without a role.

    Raises:
      UserError: a pattern matches no file, a file cannot be read, or a line has neither
        the two fields nor messages that end with the assistant's.
    """
    for file in matching_files(corpus.patterns):
        for messages, _ in _messages(file, corpus):
            yield messages


def read_conversations(corpus: Conversations) -> Iterator[Conversation]:
    """Reads conversations, each with its place in the corpus for error messages.

    Raises:
      UserError: a pattern matches no file, a file cannot be read, or a row holds no
        messages, or none of the assistant's.
    """
    for file in matching_files(corpus.patterns):
        for row, where in _rows(file, corpus.field):
            if not isinstance(row, dict) or corpus.field not in row:
                raise UserError(
                    f"{where} has no field {corpus.field!r}; it has: {_names(row)}"
                )
            parsed = _messages_of(row[corpus.field])
            if not any(role == "assistant" for role, _ in parsed):
                raise UserError(
                    f"{where}: {corpus.field} must be a list of objects with role and "
                    "content, at least one with the role assistant"
                )
            messages = tuple({"role": role, "content": text} for role, text in parsed)
            yield Conversation(messages, where)


def _rows(file: CorpusFile, field: str) -> Iterator[tuple[Any, str]]:
    if file.suffix == ".parquet":
        from recurjax.data.corpora.records import parquet_column  # needs pyarrow

        for number, value in enumerate(parquet_column(file, field), 1):
            yield {field: value}, f"{file}: row {number}"
        return
    with _opened(file) as (stream, _):
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{file}:{number}"
                yield _row(line, where), where


def _documents(talks: list[Conversation]) -> Iterator[Document]:
    """Yields the texts as one, for a tokenizer that learns from them."""
    for number, talk in enumerate(talks, 1):
        texts = [message["content"] for message in talk.messages]
        yield Document("\n".join(texts), number)


def embedded_text() -> str:
    """Returns the Shakespeare text in the package: 1,036,467 bytes of ASCII."""
    file = resources.files("recurjax.data") / "text" / "shakespeare.txt"
    return file.read_bytes().decode("ascii")


def _with_text(documents: Iterator[Document], corpus: Corpus) -> Iterator[Document]:
    empty = True
    # An empty document would be a lone BOS in the stream; an empty corpus is an error.
    for document in documents:
        if document.text:
            empty = False
            yield document
    if empty:
        raise UserError(f"the corpus holds no text: {corpus}; name files that do")


def _per_file(
    patterns: tuple[str, ...],
    documents_of: Callable[[CorpusFile, Any], Iterator[tuple[str, int]]],
    corpus: TextFiles | JsonLines | PromptAnswer,
) -> tuple[int, Iterator[Document]]:
    files = matching_files(patterns)
    # Measured first, so that the total is known before the first document.
    sizes = [file.size for file in files]

    def documents() -> Iterator[Document]:
        before = 0
        for file, size in zip(files, sizes, strict=True):
            for text, done in documents_of(file, corpus):
                # A file that has grown meanwhile must not count beyond its end.
                yield Document(text, before + min(done, size))
            before += size

    return sum(sizes), documents()


def _text_documents(file: CorpusFile, corpus: TextFiles) -> Iterator[tuple[str, int]]:
    with _opened(file) as (stream, _):
        data = stream.read()
    # Text files are decoded in one piece, because a separator may be anywhere; JSON
    # lines are read one by one.
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error
    parts = [text] if corpus.separator is None else text.split(corpus.separator)
    # Characters become bytes on disk, packed or not, by one average for the file.
    done, share = 0, file.size / max(1, len(text))
    for part in parts:
        done += len(part) + len(corpus.separator or "")
        yield part, int(done * share)


def _json_documents(file: CorpusFile, corpus: JsonLines) -> Iterator[tuple[str, int]]:
    with _opened(file) as (stream, position):
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            row = _row(line, f"{file}:{number}")
            if not isinstance(row, dict) or corpus.field not in row:
                raise UserError(
                    f"{file}:{number} has no field {corpus.field!r}; it has: "
                    f"{_names(row)}"
                )
            text = row[corpus.field]
            if text is None:
                raise UserError(null_in(f"{file}:{number}", corpus.field))
            if not isinstance(text, str):
                raise UserError(
                    f"{file}:{number}: field {corpus.field!r} must be a string, "
                    f"got {type(text).__name__}"
                )
            # For gzip the position in the compressed file, whose size the total counts.
            yield _without_lone_surrogates(text), position()


def _prompted_documents(
    file: CorpusFile, corpus: PromptAnswer
) -> Iterator[tuple[str, int]]:
    """Yields the texts as one, for a tokenizer that learns from them."""
    for messages, position in _messages(file, corpus):
        texts = [text for _, text in messages.prompt]
        yield "\n".join([*texts, messages.answer]), position


def _messages(file: CorpusFile, corpus: PromptAnswer) -> Iterator[tuple[Messages, int]]:
    with _opened(file) as (stream, position):
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{file}:{number}"
                yield _as_messages(_row(line, where), where, corpus), position()


def _as_messages(row: Any, where: str, corpus: PromptAnswer) -> Messages:
    if not isinstance(row, dict):
        raise UserError(f"{where} must be a JSON object, got {type(row).__name__}")
    if "messages" in row and corpus.prompt not in row:
        return _conversation(row["messages"], where)
    for field in (corpus.prompt, corpus.answer):
        if not isinstance(row.get(field), str):
            raise UserError(
                f"{where} needs messages or a text in the field {field!r}; it has: "
                f"{_names(row)}"
            )
    prompt, answer = (
        _without_lone_surrogates(row[field]) for field in (corpus.prompt, corpus.answer)
    )
    return Messages((("", prompt),), answer)


def _conversation(messages: Any, where: str) -> Messages:
    parsed = _messages_of(messages)
    if len(parsed) < 2 or parsed[-1][0] != "assistant":
        raise UserError(
            f"{where}: messages must be a list of at least two objects with "
            "role and content, the last with the role assistant"
        )
    return Messages(tuple(parsed[:-1]), parsed[-1][1])


def _messages_of(messages: Any) -> list[tuple[str, str]]:
    """Returns roles and texts; empty if the messages are malformed."""
    try:
        return [
            (message["role"], _without_lone_surrogates(message["content"]))
            for message in messages
        ]
    except (TypeError, KeyError, AttributeError):
        return []


def _names(row: Any) -> str:
    """Returns the names of a row's fields; else what it is."""
    if not isinstance(row, dict):
        return type(row).__name__
    return first_few(list(row), separator=", ")


def _row(line: bytes, where: str) -> Any:
    """Reads a line; half characters are left to `_without_lone_surrogates`."""
    try:
        return json.loads(line)
    except RecursionError:
        raise UserError(f"{where} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from error


@contextmanager
def _opened(file: CorpusFile) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Yields the file's bytes, unpacked if it is gzip, and its position on disk."""
    try:
        with open(file.local(), "rb") as raw:
            if file.suffix == ".gz":
                # gzip knows no place in the packed file; the file below it does.
                with gzip.open(raw) as unpacked:
                    yield cast(IO[bytes], unpacked), raw.tell
            else:
                yield raw, raw.tell
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _without_lone_surrogates(text: str) -> str:
    """Replaces half a surrogate pair, which JSON may hold, by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # UTF-16 has surrogates in pairs: written so, two halves that belong together
        # join, and a lone one is replaced.
        pairs = text.encode("utf-16-le", "surrogatepass")
        return pairs.decode("utf-16-le", "replace")
    return text
