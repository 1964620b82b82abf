"""Turns conversations into tokens with chat templates, safe from forged special tokens.

A template is a program that came with a model: it runs in jinja2's sandbox, in a
process with limits. It writes names of special tokens between the messages. A user who
types such a name has typed text, so this module tracks who wrote each name.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.data.chat.process import TemplateProcess
from recurjax.data.chat.program import CLOSED, OPENED
from recurjax.data.tokenizers import (
    Tokenizer,
    read_template,
    read_text_settings,
)
from recurjax.errors import UserError

MARK = "\U0010fffd"
"""Private-use character that precedes a token's name in a text to be encoded later."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIRST_MARK = 0x100000
"""Private use: the first of the characters that stand for names in a user's text."""


_PROCESS = TemplateProcess()


class ChatTemplate:
    """A template as transformers writes them: jinja2 over `messages`."""

    def __init__(self, source: str, *, tokens: Mapping[str, str | None] | None = None):
        """Compiles it.

        Args:
          tokens: names that templates know: `bos_token`, `eos_token` and so on.

        Raises:
          UserError: jinja2 is not installed, or the template does not compile.
        """
        self.source = source
        self._marks_answers = bool(_GENERATION.search(source))
        self._tokens = {name: text for name, text in (tokens or {}).items() if text}
        _PROCESS.render(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Writes a conversation as text.

        Args:
          messages: with a `role` and a `content` each.
          answer: end where the assistant's answer begins.
          tools, documents: what the template may offer the model; None: nothing.
          options: further variables that the template reads (`enable_thinking`).

        Raises:
          UserError: the template refuses the conversation, or fails.
        """
        return "".join(
            str(part)
            for part in self._parts(
                messages,
                {},
                answer=answer,
                variables={**(options or {}), "tools": tools, "documents": documents},
            )
        )

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns a conversation's tokens; names in a message's content are text.

        For contents without names of special tokens these are the tokens that
        transformers makes of the same template.
        """
        parts = self.parts(messages, tokenizer, answer=answer, variables=variables)
        return encoded(parts, tokenizer, guarded=self.guarded(tokenizer))

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str | int]:
        """Returns a conversation's texts, and the special tokens between them.

        Args:
          variables: `tools`, `documents` and whatever else the template reads.
        """
        guarded = self.guarded(tokenizer)
        return self._parts(messages, guarded, answer=answer, variables=variables)

    def _parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        guarded: Mapping[str, int],
        *,
        answer: bool,
        variables: Mapping[str, Any] | None,
    ) -> list[str | int]:
        # Hide the names in the messages while the template writes its own, because only
        # those become tokens; then restore the hidden names as text.
        marks = _marks(guarded, [messages, variables])
        values = self._values(messages, marks, answer=answer, variables=variables)
        [rendered] = _PROCESS.render(self.source, [values], marks=marks)
        text = rendered.replace(OPENED, "").replace(CLOSED, "")
        return _parts(text, guarded, marks)

    def _values(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: Mapping[str, str],
        *,
        answer: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the template's variables.

        Names are hidden in whatever comes with a conversation: contents, roles, the
        arguments of tools and their results, and what the template is given besides.
        """
        return {
            # Without any, both are None: a template may ask whether they are defined.
            "tools": None,
            "documents": None,
            **self._tokens,
            **{k: _hidden_in(v, marks) for k, v in (variables or {}).items()},
            "messages": [
                {role: _hidden_in(value, marks) for role, value in message.items()}
                for message in messages
            ],
            "add_generation_prompt": answer,
        }

    def guarded(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Returns the tokens that only the template may write, by their names.

        These are the special tokens, and the added tokens that the template names: a
        file may mark the tokens of roles as not special. Runs of spaces and of line
        breaks, which GPT-NeoX and Gemma add as tokens, are not roles.
        """
        added = tokenizer.added_tokens.items()
        written = {name: i for name, i in added if name.strip() and name in self.source}
        return {**tokenizer.named_tokens, **written}

    def turns(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
    ) -> list["Turn"]:
        """Cuts a conversation where the assistant begins and where it ends.

        A template that marks what the model generates (`{% generation %}`) is cut
        there, and otherwise by writing the beginnings of the conversation.

        Raises:
          UserError: the template refuses the conversation, or writes a beginning of it
            otherwise once it continues.
        """
        guarded = self.guarded(tokenizer)
        marks = _marks(guarded, messages)
        cut = self._marked if self._marks_answers else self._cut
        return [
            Turn(_parts(text, guarded, marks), says=says)
            for text, says in cut(messages, marks)
        ]

    def _marked(
        self, messages: Sequence[Mapping[str, Any]], marks: Mapping[str, str]
    ) -> list[tuple[str, bool]]:
        """Cuts at the template's own marks; what follows the last answer is dropped."""
        stretches: list[tuple[str, bool]] = []
        values = self._values(messages, marks, answer=False)
        [text] = _PROCESS.render(self.source, [values], marks=marks)
        before, *rest = text.split(OPENED)
        if not rest:
            raise UserError(
                "the chat template marks generated text, but none in this "
                "conversation: give it an assistant's message that the template "
                "writes"
            )
        for piece in rest:
            said, after = piece.split(CLOSED, 1)
            stretches += [(before, False), (said, True)]
            before = after
        return stretches

    def _cut(
        self, messages: Sequence[Mapping[str, Any]], marks: Mapping[str, str]
    ) -> list[tuple[str, bool]]:
        values = []
        for n, message in enumerate(messages):
            if message["role"] == "assistant":
                values.append(self._values(messages[:n], marks, answer=True))
                values.append(self._values(messages[: n + 1], marks, answer=False))
        texts = iter(_PROCESS.render(self.source, values, marks=marks))
        stretches: list[tuple[str, bool]] = []
        before = ""
        for opened, closed in zip(texts, texts, strict=True):
            if not opened.startswith(before) or not closed.startswith(opened):
                raise UserError(
                    "the chat template rewrites earlier messages as a conversation "
                    "grows, so the start of an answer is unknown: mark answers in the "
                    "template with {% generation %}"
                )
            stretches.append((opened[len(before) :], False))
            stretches.append((closed[len(opened) :], True))
            before = closed
        return stretches


class Turn(NamedTuple):
    """A stretch of a conversation.

    Attributes:
      parts: texts, and the special tokens between them.
      says: whether the assistant does.
    """

    parts: list[str | int]
    says: bool


def plain(messages: Sequence[tuple[str, str]]) -> str:
    """Writes "role: content" a line, up to where the assistant's answer begins."""
    return "".join(f"{role}: {text}\n" for role, text in messages) + "assistant: "


def encoded(
    parts: Sequence[str | int],
    tokenizer: Tokenizer,
    *,
    guarded: Mapping[str, int] | None = None,
) -> list[int]:
    """Returns the tokens of one text that is given in parts; see `Tokenizer`."""
    [pieces] = tokenizer.encode_parts([parts], guarded=guarded)
    return [token for piece in pieces for token in piece.tolist()]


def marked(parts: Sequence[str | int], tokenizer: Tokenizer) -> str:
    """Writes texts and the special tokens between them as one text.

    It can be read, and cut or continued like any text: `unmarked` still tells the names
    that are tokens, which have a mark before them, from those that somebody typed.
    """
    names = {number: name for name, number in tokenizer.added_tokens.items()}
    # Doubling escapes a mark within a text.
    return "".join(
        MARK + names[part] if isinstance(part, int) else part.replace(MARK, 2 * MARK)
        for part in parts
    )


def unmarked(text: str, tokenizer: Tokenizer) -> list[str | int]:
    """Returns the texts and special tokens that `marked` wrote; other text is text."""
    if MARK not in text:
        return [text]
    named, parts = tokenizer.added_tokens, [""]
    for piece in re.split(f"({MARK}{MARK}|{MARK}(?:{_any_of(named)}))", text):
        name = piece.removeprefix(MARK)
        if piece != name and name in named:
            parts += [named[name], ""]
        else:
            # Join neighbouring texts: a token may span the position of a removed mark.
            parts[-1] += MARK if piece == 2 * MARK else piece
    return [part for part in parts if part != ""]


def load_template(
    folder: Path, *, file: Path | None = None, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """Reads the template of a model's folder, or another file; None: there is none.

    Args:
      folder: with chat_template.jinja, or tokenizer_config.json that holds one.
      file: is read in its place.

    Raises:
      UserError: it cannot be read, or does not compile.
    """
    source = (
        read_text_settings(folder).template if file is None else read_template(file)
    )
    return None if source is None else compiled(source, tokenizer)


def compiled(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Compiles a template for a tokenizer, whose special tokens it may write by role.

    Raises:
      UserError: it does not compile.
    """
    return ChatTemplate(source, tokens=tokenizer.names)


def _marks(named: Mapping[str, int], values: Any) -> dict[str, str]:
    """Returns characters of no text, one for each character of a name that texts have.

    Raises:
      UserError: the texts leave no such characters.
    """
    joined = "".join(_texts(values))
    names = sorted(
        # Only the template may write the marks around generations as well.
        (name for name in (*named, OPENED, CLOSED) if name in joined),
        key=len,
        reverse=True,
    )
    used = set(joined) if names else set()
    free = (
        character
        for character in map(chr, range(_FIRST_MARK, ord(OPENED)))
        if character not in used and _escaped(character) not in joined
    )
    marks = {name: "".join(itertools.islice(free, len(name))) for name in names}
    if any(len(name) != len(mark) for name, mark in marks.items()):
        raise UserError(
            "a conversation uses too many characters of Unicode's last "
            "private plane, which stand for names of special tokens: remove "
            "some of them"
        )
    return marks


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)


def _hidden_in(value: Any, marks: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for name, mark in marks.items():  # the longest first: one may contain another
            value = value.replace(name, mark)
        return value
    if isinstance(value, Mapping):
        return {
            _hidden_in(key, marks): _hidden_in(item, marks)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hidden_in(item, marks) for item in value]
    return value


def _escaped(character: str) -> str:
    """Returns what a template writes of it as JSON of ASCII alone."""
    return json.dumps(character)[1:-1]


def _parts(
    rendered: str, named: Mapping[str, int], marks: Mapping[str, str]
) -> list[str | int]:
    """Tells names that the template wrote from text, and shows what was hidden."""
    shown = {
        form: letter
        for name, mark in marks.items()
        for letter, character in zip(name, mark, strict=True)
        for form in (character, _escaped(character))
    }
    hidden = _any_of(shown) or "(?!)"  # which nothing matches
    parts: list[str | int] = []
    for part in _split(rendered, named):
        if part in named:
            parts.append(named[part])
        elif part:
            parts.append(re.sub(hidden, lambda match: shown[match[0]], part))
    return parts


def _split(text: str, named: Mapping[str, int]) -> list[str]:
    return re.split(f"({_any_of(named)})", text) if named else [text]


def _any_of(named: Mapping[str, Any]) -> str:
    # The longest first: one name may be the beginning of another.
    return "|".join(map(re.escape, sorted(named, key=len, reverse=True)))
