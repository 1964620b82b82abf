"""One talk with a model: its messages, and answers on an engine of one slot."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT, Handlers, signal
from threading import current_thread, main_thread
from typing import Any

from recurjax.data.chat import ChatTemplate
from recurjax.data.tokenizers import Tokenizer, text_ends
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json_object
from recurjax.inference.engine import Engine, Request, RequestSettings
from recurjax.inference.sampling import SamplingConfig

Message = dict[str, str]


@dataclass(kw_only=True, slots=True)
class Answered:
    """What became of one answer.

    Attributes:
      first, seconds: from the question to the first token, and to the end.
      held: tokens of the talk that the model now holds.
    """

    prompt_tokens: int
    reused: int
    tokens: int
    first: float
    seconds: float
    reason: str
    held: int

    def sentence(self) -> str:
        """Says it in a line."""
        later = self.seconds - self.first
        speed = (self.tokens - 1) / later if later > 0 and self.tokens > 1 else 0.0
        return (
            f"{self.prompt_tokens:,} tokens read ({self.reused:,} of them kept), the "
            f"first new one after {self.first * 1000:,.0f} ms, {self.tokens:,} at "
            f"{speed:,.1f} a second, ended by {self.reason}"
        )


class Talk:
    """Messages, and how they are answered.

    Without a template the model is no chat: each text is continued by itself.

    Attributes:
      sampling: how tokens are chosen from now on.
      messages: all that was said, the system prompt first where there is one.
      last: the last answer's figures.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        sampling: SamplingConfig,
        max_new_tokens: int | None,
        seed: int,
    ):
        """Begins an empty talk; `max_new_tokens` None: what the slot has left."""
        self.sampling = sampling
        self.messages: list[Message] = []
        self.last: Answered | None = None
        self._engine, self._tokenizer, self._template = engine, tokenizer, template
        self._most, self._seed = max_new_tokens, seed
        self._asked = 0
        self._ends = text_ends(tokenizer)

    @property
    def chats(self) -> bool:
        """Whether the model answers messages; else it continues texts."""
        return self._template is not None

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") == "system" else None

    def set_system(self, text: str) -> None:
        """Begins anew with a system prompt; an empty one is none.

        Raises:
          UserError: the model has no chat template.
        """
        if not self.chats:
            raise UserError("a system prompt needs a chat template: give --template")
        self.messages = [{"role": "system", "content": text}] if text else []

    def reset(self) -> None:
        """Forgets all that was said, but not the system prompt."""
        self.messages = self.messages[:1] if self.system is not None else []

    def ask(self, text: str, show: Callable[[str], None]) -> Answered:
        """Answers a text, or continues it where the model is no chat.

        Ctrl-C ends the answer, and what was said of it stays said.

        Args:
          show: gets the answer's pieces as they come.

        Raises:
          UserError: the talk is longer than the slot, or the template refuses it; then
            the text is not a part of it.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(said)
        request, answered = self._answer(ids, show)
        self.messages = [*said, {"role": "assistant", "content": request.text}]
        self.last = answered
        return answered

    def retry(self, show: Callable[[str], None]) -> Answered:
        """Answers the last text again, with other random numbers.

        Raises:
          UserError: nothing was asked yet.
        """
        if [message["role"] for message in self.messages[-2:]] != ["user", "assistant"]:
            raise UserError("there is nothing to answer again")
        before, asked = self.messages, self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        try:
            return self.ask(asked, show)
        except BaseException:
            self.messages = before
            raise

    def save(self, file: Path) -> None:
        """Writes the messages as JSON.

        Raises:
          UserError: it cannot be written.
        """
        text = json_text({"messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            write_atomic(file, text + "\n")
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from error

    def load(self, file: Path) -> None:
        """Takes the messages of a file in the place of what was said.

        Raises:
          UserError: it cannot be read, or does not hold a talk.
        """
        self.messages = _as_talk(read_json_object(file, "the talk"), file)

    def _ids(self, said: list[Message]) -> list[int]:
        if self._template is not None:
            return self._template.encode(said, self._tokenizer)
        ids = self._tokenizer.encode(said[-1]["content"]).tolist()
        bos = self._tokenizer.bos
        return ids if bos is None else [bos, *ids]

    def _answer(
        self, ids: list[int], show: Callable[[str], None]
    ) -> tuple[Request, Answered]:
        # The last token is drawn and not read: it needs no place.
        room = self._engine.config.length - len(ids) + 1
        if room < 1:
            raise UserError(
                f"the talk has {len(ids):,} tokens, more than the "
                f"{self._engine.config.length:,} that fit: /reset, or start with a "
                "larger --length"
            )
        settings = RequestSettings(
            max_new_tokens=min(room, self._most or room),
            sampling=self.sampling,
            seed=self._seed,
            stream=self._asked,
            stop_tokens=self._ends,
        )
        self._asked += 1
        began = time.monotonic()
        request = self._engine.submit(ids, settings)
        shown = 0
        with _interrupts() as interrupted:
            while not request.done:
                self._engine.step()
                if interrupted:
                    self._engine.cancel(request)
                show(request.text[shown:])
                shown = len(request.text)
        if request.reason == "not_finite":
            raise UserError("the model's logits are not finite: it cannot answer")
        ended = time.monotonic()
        return request, Answered(
            prompt_tokens=len(ids),
            reused=request.reused,
            tokens=len(request.tokens),
            first=(request.started or ended) - began,
            seconds=ended - began,
            reason=_REASONS.get(request.reason or "", request.reason or ""),
            held=len(ids) + len(request.tokens),
        )


_REASONS = {"eos": "itself", "length": "its limit", "cancelled": "you"}


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C: raised amid a step it would leave the slots half written."""
    seen: list[int] = []
    if current_thread() is not main_thread():
        yield seen
        return
    before = signal(SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal(SIGINT, before or Handlers.SIG_DFL)


def _as_talk(values: Mapping[str, Any], file: Path) -> list[Message]:
    messages = values.get("messages")
    good = isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )
    if not good:
        raise UserError(
            f"{file} holds no talk: messages must be a list of objects with a role and "
            "a content"
        )
    assert isinstance(messages, list)
    return [{name: row[name] for name in ("role", "content")} for row in messages]


def own_sampling(
    given: SamplingConfig, wishes: Mapping[str, Any], defaults: Mapping[str, float]
) -> tuple[SamplingConfig, list[str]]:
    """Fills in the model's own settings where the user names none.

    Args:
      given: what holds where neither says anything.
      wishes: the user's, None where there is none.
      defaults: the model's own, by its generation_config.json.

    Returns:
      The settings, and those of the model's that hold.
    """
    changes, own = {}, []
    for name, wish in wishes.items():
        if wish is not None:
            changes[name] = wish
        elif name in defaults:
            changes[name] = defaults[name]
            own.append(f"{name} {defaults[name]}")
    return replace(given, **changes), own
