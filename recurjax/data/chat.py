"""Conversations as tokens: chat templates in a sandbox, and what a user may not say.

A template is a program that came with a model: it runs in jinja2's sandbox. It writes
names of special tokens between the messages; a user who types such a name has typed
text, so names are told apart by who wrote them and not by how they look.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.data.tokenizers import (
    Tokenizer,
    read_template,
    read_text_settings,
)
from recurjax.errors import UserError

_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError)
"""What a template that is no good for these messages raises, beside jinja2's own."""
MARK = "\U0010fffd"
"""Private use: stands before names that are tokens, in a text that is encoded later."""
_OPENED, _CLOSED = "\U0010fffb", "\U0010fffc"
"""Private use: stand around what the model generates, by the template's own marks."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIRST_MARK = 0x100000
"""Private use: the first of the characters that stand for names in a user's text."""


class ChatTemplate:
    """A template as transformers writes them: jinja2 over `messages`."""

    def __init__(self, source: str, *, tokens: Mapping[str, str | None] | None = None):
        """Compiles it.

        Args:
          tokens: names that templates know: `bos_token`, `eos_token` and so on.

        Raises:
          UserError: jinja2 is not installed, or the template does not compile.
        """
        try:
            from jinja2.exceptions import TemplateError  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "chat templates need jinja2: pip install recurjax[serve]"
            ) from error
        self.source = source
        self._marks_answers = bool(_GENERATION.search(source))
        self._error = TemplateError
        self._tokens = {name: text for name, text in (tokens or {}).items() if text}
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise UserError(f"the chat template does not compile: {error}") from error

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
        text = self._rendered(
            messages,
            answer=answer,
            variables={**(options or {}), "tools": tools, "documents": documents},
        )
        return text.replace(_OPENED, "").replace(_CLOSED, "")

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Writes a conversation, with `_OPENED` and `_CLOSED` around generations."""
        # Without any, both are None: a template may ask whether they are defined.
        given = {"tools": None, "documents": None, **self._tokens, **(variables or {})}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=answer,
                **given,
            )
        except _Refused as error:
            raise UserError(f"the chat template refuses: {error}") from error
        except (self._error, *_FAILURES) as error:
            raise UserError(f"the chat template fails: {error}") from error

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
        # Names in the messages are hidden while the template writes its own, which
        # alone become tokens; then they are shown again, as text.
        marks = _marks(guarded, messages)
        rendered = self._rendered(
            _hidden_in(messages, marks), answer=answer, variables=variables
        )
        text = rendered.replace(_OPENED, "").replace(_CLOSED, "")
        return _parts(text, guarded, marks)

    def guarded(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Returns the tokens that only the template may write, by their names.

        These are the special tokens, and the added tokens that the template names: a
        file may mark the tokens of roles as not special. Runs of spaces and of line
        breaks, which GPT-NeoX and Gemma add as tokens, are no roles.
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
            otherwise once it goes on.
        """
        guarded = self.guarded(tokenizer)
        marks = _marks(guarded, messages)
        hidden = _hidden_in(messages, marks)
        stretches = self._marked(hidden) if self._marks_answers else self._cut(hidden)
        return [
            Turn(_parts(text, guarded, marks), says=says) for text, says in stretches
        ]

    def _marked(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """Cuts at the template's own marks; what follows the last answer is dropped."""
        stretches: list[tuple[str, bool]] = []
        before, *rest = self._rendered(messages, answer=False).split(_OPENED)
        if not rest:
            raise UserError(
                "the chat template marks what the model generates, but nothing of this "
                "conversation"
            )
        for piece in rest:
            said, after = piece.split(_CLOSED, 1)
            stretches += [(before, False), (said, True)]
            before = after
        return stretches

    def _cut(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        stretches: list[tuple[str, bool]] = []
        before = ""
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self._rendered(messages[:n], answer=True)
            closed = self._rendered(messages[: n + 1], answer=False)
            if not opened.startswith(before) or not closed.startswith(opened):
                raise UserError(
                    "the chat template writes the beginning of a conversation "
                    "otherwise once it goes on: where an answer begins is unknown"
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
    # A mark within a text is doubled, so that it stands for itself.
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
            # Joined again: a token may reach over the place where a mark stood.
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


def _marks(
    named: Mapping[str, int], messages: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Returns characters of no message, for the names that messages contain."""
    whole = "".join(
        text
        for message in messages
        for text in message.values()
        if isinstance(text, str)
    )
    present = sorted((name for name in named if name in whole), key=len, reverse=True)
    free = (
        chr(code) for code in range(_FIRST_MARK, ord(_OPENED)) if chr(code) not in whole
    )
    return dict(zip(present, free, strict=False))


def _hidden_in(
    messages: Sequence[Mapping[str, Any]], marks: Mapping[str, str]
) -> list[dict[str, Any]]:
    return [
        {
            role: _hidden(text, marks) if isinstance(text, str) else text
            for role, text in message.items()
        }
        for message in messages
    ]


def _parts(
    rendered: str, named: Mapping[str, int], marks: Mapping[str, str]
) -> list[str | int]:
    """Tells names that the template wrote from text, and shows what was hidden."""
    shown = {mark: name for name, mark in marks.items()}
    parts: list[str | int] = []
    for part in _split(rendered, named):
        if part in named:
            parts.append(named[part])
        elif part:
            parts.append("".join(shown.get(character, character) for character in part))
    return parts


def _hidden(text: str, marks: Mapping[str, str]) -> str:
    for name, mark in marks.items():  # the longest first: one may contain another
        text = text.replace(name, mark)
    return text


def _split(text: str, named: Mapping[str, int]) -> list[str]:
    return re.split(f"({_any_of(named)})", text) if named else [text]


def _any_of(named: Mapping[str, int]) -> str:
    # The longest first: one name may be the beginning of another.
    return "|".join(map(re.escape, sorted(named, key=len, reverse=True)))


@functools.cache
def _environment() -> Any:
    """Returns jinja2 as transformers sets it up, for which templates are written."""
    from jinja2 import nodes  # pyright: ignore[reportMissingImports]
    from jinja2.ext import Extension  # pyright: ignore[reportMissingImports]
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # pyright: ignore[reportMissingImports]

    class GenerationBlock(Extension):
        """`{% generation %}` ... `{% endgeneration %}`: what the model generates."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPENED}{caller()}{_CLOSED}"

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML and sorts keys.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Refused(Exception):
    """What a template says by raise_exception."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
