"""`recurjax chat`: a talk with the model of a run directory, in the terminal."""

import importlib.util
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from recurjax.cli.chat.talk import Talk, own_sampling
from recurjax.cli.options import parse, shows_usage
from recurjax.data.chat import load_template
from recurjax.errors import UserError
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.engine import Engine, EngineConfig
from recurjax.inference.engine.memory import in_words, state_size
from recurjax.inference.sampling import PLAIN
from recurjax.model import Decoder
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

USAGE = """usage: recurjax chat RUN [options]

  recurjax chat runs/smollm2 --system "Answer in one sentence."

Talks with the model of a run directory, in the terminal; without a chat template it
continues texts. recurjax chat --help lists the options."""

HELP = """\
/system [TEXT]    begin anew with this system prompt; alone: show it
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

    Sampling that is not given is the model's own, where it came with some.

    Attributes:
      run: the run directory.
      system: the system prompt.
      template: a chat template for a run without one.
      load: a talk to go on with, as /save writes it.
      temperature: divides the logits; 0 is greedy: always the likeliest token.
      top_k: draw from this many of the likeliest tokens.
      top_p: draw from the fewest likeliest tokens with this much probability together.
      min_p: draw from tokens with this share of the likeliest one's probability.
      repetition_penalty: above 1, makes tokens less likely that were there before.
      max_new_tokens: of an answer; None: what is left of the length.
      length: tokens of the whole talk; None: 4096, or what the model has positions for.
      states_gib: memory for the talk's state, so that a turn reads only what is new.
      seed: None: another one each time.
      step: the checkpoint of this training step; None: the newest.
      mesh: devices that the model lies on.
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
    mesh: MeshConfig = MeshConfig(data=1)


def run(argv: list[str]) -> int:
    """Runs `recurjax chat ARGV` until the user ends it, and returns its exit code.

    Raises:
      UserError: something the user can put right, said in one sentence.
    """
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(ChatOptions, argv, prog="recurjax chat")
    mesh = reading_mesh(options.mesh)
    loaded = load_run(options.run, step=options.step, mesh=mesh, report=_tell)
    tokenizer = loaded.tokenizer
    template = load_template(
        options.run / "tokenizer", file=options.template, tokenizer=tokenizer
    )
    wishes = {name: getattr(options, name) for name in _SAMPLING}
    sampling, own = own_sampling(PLAIN, wishes, tokenizer.settings.sampling)
    model = in_compute_dtype(loaded.model)
    most = model.config.max_length
    length = options.length or min(4096, most or 4096)
    config = EngineConfig(
        slots=1,
        length=length,
        prefill_tokens=min(256, length),
        # Few tokens a call: text flows, and Ctrl-C is heard soon.
        steps=2,
        states_gib=options.states_gib,
    )
    spread = mesh if mesh.size > 1 else None
    engine = Engine(model, config, tokenizer=tokenizer, mesh=spread)
    engine.compile()
    talk = Talk(
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
    _tell(_greeting(talk, own))
    if template is not None and tokenizer.eos is None:
        _tell("its tokenizer has no EOS: only a limit ends an answer")
    _Terminal(talk, model).run()
    return 0


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _greeting(talk: Talk, own: list[str]) -> str:
    settings = f" with the model's own {', '.join(own)}" if own else ""
    if talk.chats:
        return f"A chat{settings}; /help lists the commands."
    return (
        f"Completion mode{settings}: the model has no chat template, so it continues "
        "each text by itself and knows nothing of the ones before (--template FILE "
        "makes it a chat); /help lists the commands."
    )


class _Terminal:
    """Reads lines and shows answers, with a prompt where somebody types."""

    def __init__(self, talk: Talk, model: Decoder):
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
                # What was typed so far is dropped; the talk goes on.
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
        def show(piece: str) -> None:
            sys.stdout.write(piece)
            sys.stdout.flush()

        answer(show)
        show("\n")
        last = self._talk.last
        if last is not None and last.reason == "you":
            _tell("(stopped)")

    def _obey(self, line: str) -> bool:
        """Does what a command says; True: it ends the talk."""
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
            _tell("(begun anew)")
        else:
            _tell(f"system: {self._talk.system or '(none)'}")

    def _temperature(self, text: str) -> None:
        if text:
            try:
                value = float(text)
            except ValueError:
                raise UserError(f"/temperature wants a number, got {text!r}") from None
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
        raise UserError(f"{word} wants the name of a file")
    return Path(name).expanduser()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
