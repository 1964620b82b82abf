"""Conversations as tokens: chat templates in a sandbox, and what a user may not say.

A template is a program that came with a model: it runs in jinja2's sandbox. It writes
names of special tokens between the messages; a user who types such a name has typed
text, so names are told apart by who wrote them and not by how they look.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recurjax.data.tokenizers import Tokenizer
from recurjax.data.tokenizers.companions import read_companions, read_template
from recurjax.errors import UserError

_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError)
"""What a template that is no good for these messages raises, beside jinja2's own."""
MARK = "\U0010fffd"
"""Private use: stands before names that are tokens, in a text that is encoded later."""
_FIRST_MARK = 0xF0000
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
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "chat templates need jinja2: pip install recurjax[serve]"
            ) from error
        self.source = source
        self._error = TemplateError
        self._tokens = {name: text for name, text in (tokens or {}).items() if text}
        # Set as transformers sets it, with which templates were written and tried.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"the chat template does not compile: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, str]], *, answer: bool = True
    ) -> str:
        """Writes a conversation as text.

        Args:
          messages: with a `role` and a `content` each.
          answer: end where the assistant's answer begins.

        Raises:
          UserError: the template refuses the conversation, or fails.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=answer,
                **self._tokens,
            )
        except _Refused as error:
            raise UserError(f"the chat template refuses: {error}") from error
        except (self._error, *_FAILURES) as error:
            raise UserError(f"the chat template fails: {error}") from error

    def encode(
        self,
        messages: Sequence[Mapping[str, str]],
        tokenizer: Tokenizer,
        *,
        answer: bool = True,
    ) -> list[int]:
        """Returns a conversation's tokens; names in a message's content are text.

        For contents without names of special tokens these are the tokens that
        transformers makes of the same template.
        """
        return encoded(self.parts(messages, tokenizer, answer=answer), tokenizer)

    def parts(
        self,
        messages: Sequence[Mapping[str, str]],
        tokenizer: Tokenizer,
        *,
        answer: bool = True,
    ) -> list[str | int]:
        """Returns a conversation's texts, and the special tokens between them."""
        named = _named(tokenizer)
        # Names in the messages are hidden while the template writes its own, which
        # alone become tokens; then they are shown again, as text.
        marks = _marks(named, messages)
        rendered = self.render(_hidden_in(messages, marks), answer=answer)
        return _parts(rendered, named, marks)

    def turns(
        self, messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer
    ) -> list["Turn"]:
        """Cuts a conversation where the assistant begins and where it ends.

        The texts of turns are to be encoded apart: so are those that a model is asked
        with, for its own tokens follow the question's.

        Raises:
          UserError: the template refuses the conversation, or writes a beginning of it
            otherwise once it goes on.
        """
        named = _named(tokenizer)
        marks = _marks(named, messages)
        hidden, turns, before = _hidden_in(messages, marks), [], ""
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self.render(hidden[:n], answer=True)
            closed = self.render(hidden[: n + 1], answer=False)
            if not opened.startswith(before) or not closed.startswith(opened):
                raise UserError(
                    "the chat template writes the beginning of a conversation "
                    "otherwise once it goes on: where an answer begins cannot be told"
                )
            read, said = opened[len(before) :], closed[len(opened) :]
            turns.append(Turn(_parts(read, named, marks), says=False))
            turns.append(Turn(_parts(said, named, marks), says=True))
            before = closed
        return turns


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


def encoded(parts: Sequence[str | int], tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of texts and of the special tokens between them."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else tokenizer.encode(part).tolist()
    return ids


def marked(parts: Sequence[str | int], tokenizer: Tokenizer) -> str:
    """Writes texts and the special tokens between them as one text.

    It can be read, and cut or continued like any text: `unmarked` still tells the names
    that are tokens, which have a mark before them, from those that somebody typed.
    """
    names = {number: name for name, number in _named(tokenizer).items()}
    # A mark within a text is doubled, so that it stands for itself.
    return "".join(
        MARK + names[part] if isinstance(part, int) else part.replace(MARK, 2 * MARK)
        for part in parts
    )


def unmarked(text: str, tokenizer: Tokenizer) -> list[str | int]:
    """Returns the texts and special tokens that `marked` wrote; other text is text."""
    if MARK not in text:
        return [text]
    named, parts = _named(tokenizer), [""]
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
    source = read_companions(folder).template if file is None else read_template(file)
    return None if source is None else compiled(source, tokenizer)


def compiled(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Compiles a template for a tokenizer, whose names of BOS and EOS it may write.

    Raises:
      UserError: it does not compile.
    """
    names = {}
    for role, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)):
        found = [name for name, n in _named(tokenizer).items() if n == token]
        names[role] = found[0] if found else None
    return ChatTemplate(source, tokens=names)


def _named(tokenizer: Tokenizer) -> dict[str, int]:
    return getattr(tokenizer, "named_tokens", {})


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
        chr(code) for code in range(_FIRST_MARK, 0x10FFFE) if chr(code) not in whole
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


class _Refused(Exception):
    """What a template says by raise_exception."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
