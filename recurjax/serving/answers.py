"""Answers in OpenAI's format: complete, or as pieces of a stream."""

import secrets
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from recurjax.data.tokenizers import Tokenizer, count_characters
from recurjax.serving.bodies import RequestOptions
from recurjax.serving.prompt_scores import PromptScores
from recurjax.serving.worker import AnswerStream, News

_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


class Choice:
    """One of an answer's texts.

    Attributes:
      begin: text that comes before it: the prompt, for `echo`.
    """

    def __init__(self, *, index: int, stream: AnswerStream, begin: str):
        self.index, self.stream, self.begin = index, stream, begin
        self.begun = False
        self.text = ""
        self.offset = 0  # Characters of the tokens with reported probabilities.
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.exits: list[tuple[str, int]] = []
        self.reason: str | None = None

    def take(self, news: News) -> None:
        """Adds news."""
        self.text += news.text
        self.tokens += news.tokens
        self.logprobs += news.logprobs
        self.top += news.top
        self.exits += news.exits
        self.reason = news.reason


class Answers:
    """Writes what becomes of one request."""

    def __init__(
        self,
        *,
        name: str,
        chat: bool,
        options: RequestOptions,
        tokenizer: Tokenizer,
        prompt_tokens: int,
    ):
        self._chat, self._options, self._tokenizer = chat, options, tokenizer
        self._prompt_tokens = prompt_tokens
        # Clients group pieces of a stream by this id: one for all its choices.
        kind = "chatcmpl" if chat else "cmpl"
        self._head = {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }

    def response(self, choices: list[Choice]) -> dict[str, Any]:
        """Returns the answer in one piece."""
        rows = []
        for choice in choices:
            # What a choice has gathered is news too: all of it at once.
            logprobs = self._logprobs(choice, choice, before=self._before(choice))
            row: dict[str, Any] = {"index": choice.index}
            if self._options.token_ids:
                row["token_ids"] = choice.tokens
            if self._options.exits:
                row["exits"] = choice.exits
            if self._chat:
                row["message"] = {"role": "assistant", "content": choice.text}
            else:
                row["text"] = choice.begin + choice.text
            row |= {
                "logprobs": logprobs,
                "finish_reason": _REASONS.get(choice.reason or "", choice.reason),
            }
            rows.append(row)
        return {**self._headed(), "choices": rows, "usage": self._usage(choices)}

    def begins(self, choices: list[Choice]) -> Iterator[dict[str, Any]]:
        """Yields what a stream begins with."""
        for choice in choices:
            if self._chat:
                delta = {"role": "assistant", "content": ""}
                yield self._piece(choice, {"delta": delta}, None, None)
            # Of a completion only an echoed prompt comes before the first token; with
            # its probabilities it comes when they are known.
            elif choice.begin and self._options.top_logprobs is None:
                choice.begun = True
                yield self._piece(choice, {"text": choice.begin}, None, None)

    def pieces(self, choice: Choice, news: News) -> Iterator[dict[str, Any]]:
        """Yields what some news become in a stream."""
        # A token may show no text yet: part of a character, or of a stop string.
        if not news.tokens and not news.text and news.reason is None:
            return
        text, before = news.text, None
        if not self._chat and not choice.begun:
            text, before = choice.begin + text, self._before(choice)
        choice.begun = True
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"delta": {"content": text}}
        if self._options.token_ids:
            content["token_ids"] = news.tokens
        if self._options.exits:
            content["exits"] = news.exits
        logprobs = self._logprobs(choice, news, before=before)
        # Chats tell their end in a piece of its own, with an empty delta.
        reason = None if self._chat else _REASONS.get(news.reason or "")
        yield self._piece(choice, content, logprobs, reason)
        if self._chat and news.reason is not None:
            yield self._piece(choice, {"delta": {}}, None, _REASONS.get(news.reason))

    def ends(self, choices: list[Choice]) -> Iterator[dict[str, Any]]:
        """Yields what a stream ends with, before its last word."""
        # No choices in this piece, as OpenAI documents it.
        if self._options.include_usage:
            usage = self._usage(choices)
            yield {**self._headed(chunk=True), "choices": [], "usage": usage}

    def _headed(self, *, chunk: bool = False) -> dict[str, Any]:
        # Pieces of a completion have its object name; a chat's are chunks.
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            **self._head,
            "object": kind + (".chunk" if chunk and self._chat else ""),
        }

    def _piece(
        self, choice: Choice, content: dict, logprobs: Any, reason: str | None
    ) -> dict[str, Any]:
        row = {"index": choice.index, **content}
        row |= {"logprobs": logprobs, "finish_reason": reason}
        piece = {**self._headed(chunk=True), "choices": [row]}
        return piece | ({"usage": None} if self._options.include_usage else {})

    def _usage(self, choices: list[Choice]) -> dict[str, int]:
        completion = sum(len(choice.tokens) for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }

    def _logprobs(
        self,
        choice: Choice,
        news: Choice | News,
        *,
        before: tuple[list[int], PromptScores] | None = None,
    ) -> Any:
        if self._options.top_logprobs is None:
            return None
        count = self._options.top_logprobs
        tokens, logprobs, best = [*news.tokens], [*news.logprobs], [*news.top]
        # The two routes return probabilities in different forms.
        if self._chat:
            rows = []
            for token, value, row in zip(tokens, logprobs, best, strict=True):
                others = [self._named(t, v) for t, v in row[:count]]
                rows.append(self._named(token, value) | {"top_logprobs": others})
            return {"content": rows}
        if before is not None:
            prompt, scores = before
            tokens = [*prompt, *tokens]
            # Nothing comes before the first token, so it has no probability.
            logprobs, best = (
                [None, *scores.logprobs, *logprobs],
                [None, *scores.top, *best],
            )
        lengths = (
            count_characters(self._tokenizer.bytes_of(token)) for token in tokens
        )
        *offsets, choice.offset = accumulate(lengths, initial=choice.offset)
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": [
                None if row is None else self._by_name(row[:count]) for row in best
            ],
            "text_offset": offsets,
        }

    def _by_name(self, row: list[tuple[int, float]]) -> dict[str, float]:
        """Returns the likeliest tokens by their texts.

        Several tokens can have one text (special tokens have none): a further one is
        named by its id, so that none is lost.
        """
        named: dict[str, float] = {}
        for token, value in row:
            name = self._name(token)
            named[f"token_id:{token}" if name in named else name] = value
        return named

    def _before(self, choice: Choice) -> tuple[list[int], PromptScores] | None:
        """Returns an echoed prompt's tokens and what the model makes of them."""
        scores = choice.stream.scores
        return None if scores is None else (choice.stream.prompt.tolist(), scores)

    def _named(self, token: int, value: float) -> dict[str, Any]:
        data = list(self._tokenizer.bytes_of(token))
        return {"token": self._name(token), "logprob": value, "bytes": data}

    def _name(self, token: int) -> str:
        """Returns a token's text; of a part of a character, as OpenAI, its bytes."""
        data = self._tokenizer.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
