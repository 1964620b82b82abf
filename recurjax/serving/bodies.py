"""Bodies of requests: read field by field, each with a sentence for what is wrong."""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from recurjax.errors import UserError
from recurjax.files.json_files import parse_json
from recurjax.inference.engine import RequestSettings
from recurjax.inference.sampling import SamplingConfig
from recurjax.serving.errors import RequestError

# A text counts once, whatever is in it, like each sign that separates values. One
# match counts them all: a match for each would take ten times as long.
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+'
_VALUES = rb'(?s)(?:[^"\[{,]*+(?:[\[{,]|' + _TEXT + rb")){%d}+"
_NAMES = rb'(?s)(?:[^":]*+(?:' + _TEXT + rb'[^":]*+)*+:){%d}+'
MOST_NAMES = 2**14
"""Of fields, in all objects of a body: a name takes as long as several values."""
MOST_CHOICES = 64
MOST_STOP_STRINGS = 16
MOST_MESSAGES = 4096
LONGEST_ROLE = 64
LONGEST_OPTIONS = 2**16
"""Characters of `chat_template_kwargs`, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """The settings of a body, without its prompt.

    Attributes:
      model: its name.
      max_tokens: None: as many as the slot has room for.
      top_logprobs: the most likely tokens returned at each position; None: no
        probabilities.
      token_ids: return them next to the text.
      exits: return the loop after which each piece exited.
      threshold: threshold of the server's exit rule; None: the rule's own.
    """

    model: str
    n: int
    max_tokens: int | None
    stream: bool
    include_usage: bool
    echo: bool
    token_ids: bool
    exits: bool
    threshold: float | None
    top_logprobs: int | None
    stop: tuple[str, ...]
    seed: int
    sampling: SamplingConfig
    ignore_eos: bool

    def request_settings(
        self, *, limit: int, choice: int, ends: tuple[int, ...] = (), adapter: int = 0
    ) -> RequestSettings:
        """Returns the settings of one of the n choices.

        Args:
          limit: upper limit of its tokens.
          choice: its number.
          ends, adapter: the model's.
        """
        return RequestSettings(
            # A request for none is not continued: see `Stream`.
            max_new_tokens=max(limit, 1),
            sampling=self.sampling,
            seed=self.seed,
            stream=choice,
            stop=self.stop,
            stop_tokens=() if self.ignore_eos else ends,
            ignore_eos=self.ignore_eos,
            logprobs=self.top_logprobs is not None,
            threshold=self.threshold,
            adapter=adapter,
        )


def read_body(data: bytes | bytearray, *, values: int, longest: int) -> dict[str, Any]:
    """Reads a body that must be a JSON object.

    Args:
      data: the body.
      values: commas, brackets and texts that it may have: what JSON costs to read is
        their number, and not its bytes.
      longest: bytes between two quotation marks: JSON takes 90 ms for a text of 16 MiB
        of escapes.

    Raises:
      RequestError: 413: it has more, or more than `MOST_NAMES`; 400: it is not JSON
        object.
    """
    # Anything else than an object is refused by how it begins.
    begin = re.match(rb"[ \t\r\n]*+([{\[\"0-9tfnNI-]?)", data)
    if begin and begin[1] == b"{":
        _check_counts(data, values)
        _check_texts(data, longest)
    elif begin and begin[1]:
        raise RequestError(400, "the body must be a JSON object")
    try:
        body = parse_json(data, "the body")
    except UserError as error:
        raise RequestError(400, str(error)) from None
    assert isinstance(body, dict)
    return body


def _check_counts(data: bytes | bytearray, values: int) -> None:
    # Most bodies have few of these bytes, their texts included.
    signs = len(data) - len(data.translate(None, b',[{"'))
    if signs > values and re.match(_VALUES % (values + 1), data):
        raise RequestError(
            413,
            f"the body exceeds the {values:,} commas, brackets and strings "
            "that are accepted here: send less",
        )
    if data.count(b":") > MOST_NAMES and re.match(_NAMES % (MOST_NAMES + 1), data):
        raise RequestError(
            413,
            f"the body exceeds the {MOST_NAMES:,} field names that are "
            "accepted: send fewer",
        )


def _check_texts(data: bytes | bytearray, longest: int) -> None:
    if len(data) > longest and max(map(len, data.split(b'"'))) > longest:
        raise RequestError(
            413, f"a text of the body may have {longest:,} bytes here, escapes included"
        )


def read_options(
    body: Mapping[str, Any],
    *,
    chat: bool,
    defaults: Mapping[str, float] = MappingProxyType({}),
) -> RequestOptions:
    """Reads the fields of a completion or a chat completion, but for the prompt.

    Args:
      body: the request's.
      chat: which of the two it is.
      defaults: the model's own sampling, by the names of `SamplingParams`.

    Raises:
      RequestError: 400, naming the first field that is wrong or unknown.
    """
    # Unknown fields are refused: a typing mistake must not become a default.
    known = CHAT_FIELDS if chat else COMPLETION_FIELDS
    for name in body:
        if name not in known:
            raise RequestError(
                400,
                f"a request has no field {repr(name)[:100]}: leave it out",
                field=name[:100],
            )
    # Clients send OpenAI's defaults along; those change nothing here.
    for name, neutral in NEUTRAL.items():
        if neutral is not ANY and body.get(name) not in (None, *neutral):
            accepted = " or ".join(json.dumps(value) for value in neutral)
            instead = f", or send {accepted}" if neutral else ""
            raise RequestError(
                400, f"{name} is not supported: leave it out{instead}", field=name
            )
    stop = body.get("stop")
    stop = [stop] if isinstance(stop, str) else ([] if stop is None else stop)
    texts = isinstance(stop, list) and all(isinstance(x, str) and x for x in stop)
    if not texts or len(stop) > MOST_STOP_STRINGS:
        raise RequestError(
            400,
            f"stop must be a non-empty string or up to {MOST_STOP_STRINGS} of them",
            field="stop",
        )
    options = _single(body, "stream_options", {}, dict, "an object")
    for name in options:
        if name != "include_usage":
            shown = repr(name)[:100]
            raise RequestError(
                400,
                f"stream_options has no field {shown}, only include_usage: leave "
                "it out",
                field=name[:100],
            )
    top = _top_logprobs(body, chat=chat)
    seed = _number(body, "seed", None, integer=True, least=-(2**63), most=2**64)
    # 0 and -1 say in other servers' words that all tokens are kept.
    top_k = _number(
        body, "top_k", defaults.get("top_k", 0), integer=True, least=-1, most=2**31 - 1
    )
    try:
        sampling = SamplingConfig(
            temperature=_number(
                body, "temperature", defaults.get("temperature", 1.0), least=0, most=1e6
            ),
            top_p=_number(body, "top_p", defaults.get("top_p", 1.0), least=0, most=1),
            top_k=None if top_k < 1 else top_k,
            min_p=_number(body, "min_p", 0.0, least=0, most=1),
            repetition_penalty=_number(
                body,
                "repetition_penalty",
                defaults.get("repetition_penalty", 1.0),
                least=0,
                most=1e6,
            ),
        )
    except UserError as error:
        # A client knows the field, and not the class that it becomes.
        sentence = str(error).removeprefix("SamplingConfig.")
        raise RequestError(400, sentence) from None
    limit = "max_tokens"
    if chat and body.get("max_completion_tokens") is not None:
        limit = "max_completion_tokens"
    # Without new tokens a completion only scores the prompt that it echoes.
    least = 0 if not chat and _flag(body, "echo") else 1
    return RequestOptions(
        model=_single(body, "model", "", str, "a text"),
        n=_number(body, "n", 1, integer=True, least=1, most=MOST_CHOICES),
        max_tokens=_number(
            body, limit, None, integer=True, least=least, most=2**31 - 1
        ),
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        echo=_flag(body, "echo"),
        token_ids=_flag(body, "return_token_ids"),
        exits=_flag(body, "return_exits"),
        threshold=_number(body, "exit", None, least=0, most=1),
        top_logprobs=top,
        stop=tuple(stop),
        seed=secrets.randbits(32) if seed is None else seed % 2**32,
        sampling=sampling,
        ignore_eos=_flag(body, "ignore_eos"),
    )


def read_prompts(body: Mapping[str, Any]) -> list[str] | list[list[int]]:
    """Reads `prompt`: a text, ids of tokens, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        # Texts, one prompt's ids, or several prompts' ids: the type decides.
        if all(isinstance(text, str) for text in prompt):
            return prompt
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(ids, list) and ids and _are_ids(ids) for ids in prompt):
            return prompt
    raise RequestError(
        400,
        "prompt must be a string, a list of strings, a list of token ids "
        "or a list of such lists",
        field="prompt",
    )


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**31 for value in values)


def read_template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `chat_template_kwargs`: further variables of the chat template."""
    options = _single(body, "chat_template_kwargs", {}, dict, "an object")
    if len(json.dumps(options)) > LONGEST_OPTIONS:
        raise RequestError(
            400,
            f"chat_template_kwargs must be at most {LONGEST_OPTIONS:,} "
            "characters of JSON",
            field="chat_template_kwargs",
        )
    for name in ("messages", "add_generation_prompt"):
        if name in options:
            raise RequestError(
                400,
                f"chat_template_kwargs cannot set {name}: leave it out",
                field="chat_template_kwargs",
            )
    return options


def read_messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Reads `messages`: a role and a text each."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        raise RequestError(
            400,
            f"messages must be a list of 1 to {MOST_MESSAGES} messages",
            field="messages",
        )
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Any, number: int) -> dict[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(
            400, f"{where} must have a role and a content", field="messages"
        )
    if len(message["role"]) > LONGEST_ROLE:
        raise RequestError(
            400,
            f"{where}: role must be at most {LONGEST_ROLE} characters",
            field="messages",
        )
    content = message.get("content")
    # Content in parts: text parts are joined, any other kind is refused.
    if isinstance(content, list):
        texts = [
            part["text"]
            for part in content
            if isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ]
        if len(texts) == len(content):
            content = "".join(texts)
    if not isinstance(content, str):
        raise RequestError(
            400,
            f"{where}: content must be a string or a list of text parts",
            field="messages",
        )
    return {"role": message["role"], "content": content}


def _top_logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    # A count on the one route, a switch and a count on the other.
    if not chat:
        return _number(body, "logprobs", None, integer=True, least=0, most=20)
    top = _number(body, "top_logprobs", 0, integer=True, least=0, most=20)
    if not _flag(body, "logprobs"):
        if top:
            raise RequestError(
                400,
                "top_logprobs needs logprobs true: set it, or leave top_logprobs out",
                field="top_logprobs",
            )
        return None
    return top


def _number(
    body: Mapping[str, Any],
    name: str,
    default: Any,
    *,
    integer: bool = False,
    least: float | int,
    most: float | int,
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    # `type`, not isinstance: true would pass for 1.
    kinds = (int,) if integer else (int, float)
    if type(value) not in kinds or not least <= value <= most:
        kind = "an integer" if integer else "a number"
        raise RequestError(
            400, f"{name} must be {kind} from {least} to {most}", field=name
        )
    return value if integer else float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    return _single(body, name, False, bool, "true or false")


def _single(
    body: Mapping[str, Any], name: str, default: Any, kind: type, expected: str
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestError(400, f"{name} must be {expected}", field=name)
    return value


ANY = object()
"""Of a field that changes no answer, whatever its value."""
NEUTRAL: dict[str, Any] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ANY,
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": ANY,
    "prompt_cache_options": ANY,
    "prompt_cache_retention": ANY,
    "reasoning_effort": ("none", "minimal", "low", "medium", "high"),
    "response_format": ({"type": "text"},),
    "safety_identifier": ANY,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": ANY,
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""OpenAI's fields that change nothing at these values, and are refused at others."""

_BOTH = frozenset(
    {
        "model",
        "n",
        "max_tokens",
        "stream",
        "stream_options",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logprobs",
        "ignore_eos",
        "return_token_ids",
        "return_exits",
        "exit",
        *("frequency_penalty", "logit_bias", "presence_penalty", "user"),
    }
)
COMPLETION_FIELDS = _BOTH | {"prompt", "echo", "best_of", "suffix"}
CHAT_FIELDS = (_BOTH | NEUTRAL.keys() - {"best_of", "suffix"}) | {
    *("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"),
}
