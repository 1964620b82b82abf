"""`recurjax chat`: a talk with the model of a run directory, in the terminal.

The command reads lines and shows answers; `ChatSession` holds messages and answers
them on an engine of one slot.
"""

import importlib.util
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT, Handlers, signal
from threading import current_thread, main_thread
from typing import Annotated, Any

import tyro

from recurjax.cli.options import parse, shows_usage
from recurjax.convert.hub import imported_run
from recurjax.data.chat import ChatTemplate, load_template
from recurjax.data.tokenizers import Tokenizer, text_ends
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json_object
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.engine import Engine, EngineConfig, Request, RequestSettings
from recurjax.inference.engine.memory import in_words, state_size
from recurjax.inference.sampling import SamplingConfig, requested_sampling
from recurjax.machine import terminal
from recurjax.model import Decoder, WeightDtype
from recurjax.ranges import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RangeChecks,
    Seed,
)
from recurjax.sharding import MeshConfig, reading_mesh
from recurjax.training.run import load_run

Message = dict[str, str]

USAGE = """usage: recurjax chat RUN [options]

  recurjax chat runs/smollm2 --system "Answer in one sentence."
  recurjax chat hf:OWNER/NAME

Talks with the model of a run directory, in the terminal; without a chat template it
continues texts. recurjax chat --help lists the options."""

HELP = """\
/system [TEXT]    start again with this system prompt; alone: show it
/reset            forget what was said, but not the system prompt
/retry            answer the last text again
/temperature [X]  0 is greedy; alone: show it
/stats            speed of the last answer, size of the state
/save FILE, /load FILE
/exit             or Ctrl-D; Ctrl-C stops an answer
A line that ends in \\ goes on in the next one; // begins a text with a slash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(RangeChecks):
    """Talks with a trained model.

    Sampling options default to the model's generation_config.json, if it has one.

    Attributes:
      run: the run directory, or hf:OWNER/NAME[@REVISION] of the Hugging Face Hub.
      system: the system prompt.
      template: a chat template for a run without one.
      load: continue a conversation that /save wrote to this file.
      temperature: divides the logits; 0 is greedy (always the likeliest token).
      top_k: sample from this many of the likeliest tokens.
      top_p: sample from the fewest likeliest tokens whose probabilities sum to this.
      min_p: sample from tokens with at least this share of the likeliest one's
        probability.
      repetition_penalty: above 1, makes tokens of the conversation less likely.
      max_new_tokens: most tokens of an answer; None: until the conversation has
        --length tokens.
      length: most tokens of the conversation; None: 4096, or the model's learned
        positions.
      states_gib: GiB of memory for the conversation's state, so that a turn reads only
        new tokens.
      seed: seed of sampling; None: a new one each time.
      step: training step of the checkpoint; None: the newest.
      weights: dtype of the weights in memory: int8 or int4 (64 inputs share a scale;
        tables in int8), q8_0, q4_0 or q4_1 (GGUF's groups of 32; tables in q8_0), with
        -layers tables unchanged; None: as stored.
      mesh: devices that hold the model.
    """

    run: Annotated[Path, tyro.conf.Positional]
    system: str | None = None
    template: Path | None = None
    load: Path | None = None
    temperature: NonNegativeFloat | None = None
    top_k: PositiveInt | None = None
    top_p: PositiveFraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: PositiveFloat | None = None
    max_new_tokens: PositiveInt | None = None
    length: PositiveInt | None = None
    states_gib: NonNegativeFloat = 0.5
    seed: Seed | None = None
    step: NonNegativeInt | None = None
    weights: WeightDtype | None = None
    mesh: MeshConfig = MeshConfig(data=1)


@dataclass(kw_only=True, slots=True)
class Answered:
    """The outcome of one answer.

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
        """Returns one line that describes it."""
        later = self.seconds - self.first
        speed = (self.tokens - 1) / later if later > 0 and self.tokens > 1 else 0.0
        return (
            f"{self.prompt_tokens:,} tokens read ({self.reused:,} of them kept), the "
            f"first new one after {self.first * 1000:,.0f} ms, {self.tokens:,} at "
            f"{speed:,.1f} a second, ended by {self.reason}"
        )


class ChatSession:
    """Messages, and how they are answered.

    Without a template the model is not a chat: each text is continued by itself.

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
        self._answers = 0
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
        """Starts again with a system prompt; an empty one is none.

        Raises:
          UserError: the model has no chat template.
        """
        if not self.chats:
            raise UserError(
                "a system prompt needs a chat template, which the model lacks: "
                "add --template FILE"
            )
        self.messages = [{"role": "system", "content": text}] if text else []

    def reset(self) -> None:
        """Forgets all that was said, but not the system prompt."""
        self.messages = self.messages[:1] if self.system is not None else []

    def ask(self, text: str, show: Callable[[str], None]) -> Answered:
        """Answers a text, or continues it where the model is not a chat.

        Ctrl-C ends the answer, and what was said of it stays said.

        Args:
          show: gets the answer's pieces as they come.

        Raises:
          UserError: the talk is longer than the slot, or the template refuses it; then
            the text is not a part of it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(messages)
        request, answered = self._answer(ids, show)
        self.messages = [*messages, {"role": "assistant", "content": request.text}]
        self.last = answered
        return answered

    def retry(self, show: Callable[[str], None]) -> Answered:
        """Answers the last text again, with other random numbers.

        Raises:
          UserError: there is no text to answer again.
        """
        if [message["role"] for message in self.messages[-2:]] != ["user", "assistant"]:
            raise UserError("/retry needs an answer to replace: send a text first")
        before, last = self.messages, self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        try:
            return self.ask(last, show)
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
        """Replaces the conversation by the messages of a file.

        Raises:
          UserError: it cannot be read, or does not hold a talk.
        """
        self.messages = _as_talk(read_json_object(file, "the talk"), file)

    def _ids(self, messages: list[Message]) -> list[int]:
        if self._template is not None:
            return self._template.encode(messages, self._tokenizer)
        ids = self._tokenizer.encode(messages[-1]["content"]).tolist()
        bos = self._tokenizer.bos
        return ids if bos is None else [bos, *ids]

    def _answer(
        self, ids: list[int], show: Callable[[str], None]
    ) -> tuple[Request, Answered]:
        # The last token is drawn and not read: it needs no place.
        room = self._engine.config.length - len(ids) + 1
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids):,} tokens and the model's cache "
                f"{self._engine.config.length:,}: /reset, or start with a larger "
                "--length"
            )
        settings = RequestSettings(
            max_new_tokens=min(room, self._most or room),
            sampling=self.sampling,
            seed=self._seed,
            stream=self._answers,
            stop_tokens=self._ends,
        )
        self._answers += 1
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
            raise UserError(
                "the model's logits are not finite, so it cannot answer: its "
                "parameters hold NaN or infinities, or its activations overflow"
            )
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
            f"{file} must be a saved conversation: a list of messages, each "
            "with a role and a content"
        )
    assert isinstance(messages, list)
    return [{name: row[name] for name in ("role", "content")} for row in messages]


def run(argv: list[str]) -> int:
    """Runs `recurjax chat ARGV` until the user ends it, and returns its exit code.

    Raises:
      UserError: a mistake that the user can correct.
    """
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(ChatOptions, argv, prog="recurjax chat")
    options = replace(options, run=imported_run(options.run, report=_tell))
    mesh = reading_mesh(options.mesh)
    loaded = load_run(
        options.run,
        step=options.step,
        mesh=mesh,
        weights=options.weights or "stored",
        report=_tell,
    )
    tokenizer = loaded.tokenizer
    template = load_template(
        options.run / "tokenizer", file=options.template, tokenizer=tokenizer
    )
    sampling, changed = requested_sampling(options, tokenizer.settings.sampling)
    model = in_compute_dtype(loaded.model)
    most = model.config.max_length
    length = options.length or min(4096, most or 4096)
    config = EngineConfig(
        slots=1,
        length=length,
        prefill_tokens=min(256, length),
        # Few tokens per call: text flows, and Ctrl-C is heard soon.
        steps=2,
        states_gib=options.states_gib,
    )
    spread = mesh if mesh.size > 1 else None
    engine = Engine(model, config, tokenizer=tokenizer, mesh=spread)
    with terminal.shown_elapsed("compiling"):
        engine.compile()
    talk = ChatSession(
        engine,
        tokenizer,
        template,
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
    )
    if options.load is not None:
        talk.load(options.load.expanduser())
    if options.system is not None:
        talk.set_system(options.system)
    _tell(_greeting(talk, changed))
    if template is not None and tokenizer.eos is None:
        _tell("its tokenizer has no EOS: only a limit ends an answer")
    _Terminal(talk, model).run()
    return 0


def _greeting(talk: ChatSession, changed: list[str]) -> str:
    settings = f" with the model's own {', '.join(changed)}" if changed else ""
    if talk.chats:
        return f"A chat{settings}; /help lists the commands."
    return (
        f"Completion mode{settings}: the model has no chat template, so it continues "
        "each text by itself and knows nothing of the ones before (--template FILE "
        "makes it a chat); /help lists the commands."
    )


class _Terminal:
    """Reads lines and shows answers, with a prompt where somebody types."""

    def __init__(self, talk: ChatSession, model: Decoder):
        self._talk, self._model = talk, model
        self._typed = sys.stdin.isatty() and sys.stdout.isatty()
        if self._typed and importlib.util.find_spec("readline") is not None:
            importlib.import_module("readline")  # arrows edit and recall lines

    def run(self) -> None:
        """Answers until the input or the user ends it."""
        for line in self._texts():
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if self._obey(line):
                        return
                else:
                    text = line[1:] if line.startswith("//") else line
                    self._show(lambda show, text=text: self._talk.ask(text, show))
            except UserError as error:
                _tell(f"recurjax: {error}")

    def _texts(self) -> Iterator[str]:
        """Yields what was typed; lines joined where one ends in a backslash."""
        parts: list[str] = []
        while True:
            try:
                line = self._line("... " if parts else "> ")
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                # What was typed so far is dropped; the talk continues.
                parts = []
                _tell("\n(/exit or Ctrl-D ends the talk)")
                continue
            if line is None:
                if self._typed:
                    print()
                if parts:
                    yield "\n".join(parts)
                return
            if line.endswith("\\"):
                parts.append(line[:-1])
                continue
            text, parts = "\n".join([*parts, line]), []
            if text.strip():
                yield text

    def _line(self, prompt: str) -> str | None:
        if self._typed:
            try:
                return input(prompt)
            except EOFError:
                return None
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UserError(f"the input is not UTF-8 text: {error}") from error
        return line.rstrip("\r\n") if line else None

    def _show(self, answer: Callable) -> None:
        answer(terminal.write)
        terminal.write("\n")
        last = self._talk.last
        if last is not None and last.reason == "you":
            _tell("(stopped)")

    def _obey(self, line: str) -> bool:
        """Runs a command; returns whether it ends the chat."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/exit" | "/quit":
                return True
            case "/help":
                _tell(HELP)
            case "/reset":
                self._talk.reset()
                _tell("(forgotten)")
            case "/retry":
                self._show(self._talk.retry)
            case "/system":
                self._system(rest)
            case "/temperature":
                self._temperature(rest)
            case "/save":
                self._talk.save(_file(rest, word))
                _tell(f"({len(self._talk.messages)} messages in {rest})")
            case "/load":
                self._talk.load(_file(rest, word))
                _tell(f"({len(self._talk.messages)} messages)")
            case "/stats":
                self._stats()
            case _:
                raise UserError(f"there is no command {word}: /help lists them")
        return False

    def _system(self, text: str) -> None:
        if text:
            self._talk.set_system(text)
            _tell("(started again)")
        else:
            _tell(f"system: {self._talk.system or '(none)'}")

    def _temperature(self, text: str) -> None:
        if text:
            try:
                value = float(text)
            except ValueError:
                raise UserError(
                    f"/temperature needs a number of at least 0, got {text!r}"
                ) from None
            self._talk.sampling = replace(self._talk.sampling, temperature=value)
        _tell(f"temperature {self._talk.sampling.temperature:g}")

    def _stats(self) -> None:
        last = self._talk.last
        if last is None:
            _tell("nothing was answered yet")
            return
        _tell(last.sentence())
        _tell(in_words(state_size(self._model, last.held)))


def _file(name: str, word: str) -> Path:
    if not name:
        raise UserError(f"{word} needs a file name")
    return Path(name).expanduser()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
