"""Continues prompts with any model: an engine with as many slots as prompts."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, Int32

from recurjax.data.tokenizers import Tokenizer, text_ends
from recurjax.errors import UserError
from recurjax.exits import EarlyExit
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.engine import Engine, EngineConfig, Request, RequestSettings
from recurjax.inference.sampling import PLAIN, SamplingConfig
from recurjax.model import Decoder
from recurjax.ranges import LARGEST_SIZE

FinishReason = Literal["eos", "stop", "length"]
"""What ended a text: an EOS token, a stop string, the token limit."""

CHUNK = 16
"""Tokens a text between two looks at them by the host, where someone waits for them."""

LONG_CHUNK = 64
"""The same where nobody does: each call has a cost of its own."""

_CACHE_STEP = 64
_SMALLEST_BUCKET = 16
_READ_AT_ONCE = 4096
"""Tokens of prompts in one call where there are more prompts than slots."""

OnText = Callable[[int, str], None]
"""Called with a prompt's number and the next piece of its text."""


class NotFinite(UserError):
    """Logits are NaN or infinite, so that nothing can be drawn from them."""


@dataclass(kw_only=True, slots=True)
class Timing:
    """Seconds and tokens of all texts; each one's first token comes from the prefill.

    Attributes:
      compile_seconds: near 0 when the same shapes were run before.
    """

    rows: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens read per second."""
        seconds = self.prefill_seconds
        return self.prompt_tokens / seconds if seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second after each text's first; 0 when there are none."""
        later = self.new_tokens - self.rows
        return later / self.decode_seconds if self.decode_seconds else 0.0

    @contextmanager
    def measure(self, phase: str, engine: Engine) -> Iterator[None]:
        """Adds the body's time to `<phase>_seconds`, what it compiles apart."""
        start, compiled = time.perf_counter(), engine.compile_seconds
        yield
        compiled = engine.compile_seconds - compiled
        self.compile_seconds += compiled
        seconds = time.perf_counter() - start - compiled
        setattr(self, f"{phase}_seconds", getattr(self, f"{phase}_seconds") + seconds)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The continuation of each prompt, in the prompts' order.

    Attributes:
      texts: up to a stop string; empty without a tokenizer.
      tokens: the new tokens, those that ended a text included.
      finish_reasons: what ended each text.
      timing: seconds and tokens per second.
      aux: what the prefill had to report, see `Decoder.prefill`, empty when exact; of
        early exits, the mean loops per token.
      loops: with early exits, the number of loops that each token ran; else None.
    """

    texts: list[str]
    tokens: list[Int32[np.ndarray, " _"]]
    finish_reasons: list[FinishReason]
    timing: Timing
    aux: dict[str, float]
    loops: list[list[int]] | None = None


def generate(
    model: Decoder,
    prompts: Sequence[str],
    *,
    tokenizer: Tokenizer,
    max_new_tokens: int = 200,
    sampling: SamplingConfig = PLAIN,
    stop: Sequence[str] = (),
    bos: bool = True,
    seed: int = 0,
    on_text: OnText | None = None,
    cache_length: int | None = None,
    chunk: int | None = None,
    prefill: str = "exact",
    mesh: Mesh | None = None,
    exits: EarlyExit | None = None,
    speculate: int | None = None,
) -> Generation:
    """Continues texts, all at once.

        result = generate(model, ["To be,"], tokenizer=tokenizer, max_new_tokens=100)
        print("To be," + result.texts[0])

    Args:
      model: any variant.
      max_new_tokens: for each text; a token of `text_ends` or a stop string may end it
        earlier.
      stop: a text ends before the first of these strings, which may span tokens.
      bos: put the tokenizer's BOS, if it has one, before each prompt, as before
        documents in training; False: the prompts continue a text from its middle. An
        empty prompt always starts from BOS.
      seed: text r is drawn from the stream `row_keys(seed, B)[r]`.
      on_text: called with a text's number and its next piece; they join to `texts`.
      cache_length, chunk, prefill, mesh, exits, speculate: see `generate_tokens`.

    Raises:
      UserError: see `generate_tokens`; also an empty prompt without a BOS, and a
        tokenizer that the model does not fit.
    """
    timing = Timing()
    finished = continue_prompts(
        model,
        prompts,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        bos=bos,
        seed=seed,
        on_text=on_text,
        cache_length=cache_length,
        chunk=chunk,
        prefill=prefill,
        mesh=mesh,
        exits=exits,
        speculate=speculate,
        timing=timing,
    )
    return as_generation([request for _, request in in_order(finished)], timing)


def generate_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, " _"]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = PLAIN,
    eos: int | Collection[int] | None = None,
    seed: int = 0,
    cache_length: int | None = None,
    chunk: int | None = None,
    prefill: str = "exact",
    mesh: Mesh | None = None,
    exits: EarlyExit | None = None,
    speculate: int | None = None,
) -> Generation:
    """Continues token sequences, all at once.

    Each row has its own position and random stream, so that its tokens do not depend on
    the other rows, up to the rounding of matrix products.

    Args:
      max_new_tokens: for each row.
      eos: the token that ends a row, or several of them; None: nothing does.
      seed: row r draws from the stream `row_keys(seed, B)[r]`.
      cache_length: how many tokens a row's cache can hold; None: as many as needed.
      chunk: tokens of a row in one call of the compiled loop, after which the host
        looks for stop strings. None: 16 where text is streamed, else 64.
      prefill: "exact", or a way of the variant's own, see `Decoder.prefill`: "sweeps:N"
        reads the prompts of a latent recurrence in N parallel sweeps after a first one.
      mesh: mesh of the model; its data and fsdp axes shard the rows if they divide
        them, else every device reads all. Each process must be given the same prompts
        and gets all tokens. None: one device.
      exits: let tokens leave a recursive model early; the prompts are read through all
        loops.
      speculate: let a recursive model's first loop draft up to this many tokens, which
        the full model verifies; see `EngineConfig`.

    Raises:
      UserError: no prompt; an empty one; a prompt and its continuation are longer than
        the model or the cache allows; a token that the model does not have.
      NotFinite: logits are NaN or infinite.
    """
    ends = eos if isinstance(eos, Collection) else [] if eos is None else [eos]
    settings = RequestSettings(
        max_new_tokens=_countable(max_new_tokens),
        sampling=sampling,
        seed=seed,
        stop_tokens=tuple(map(int, ends)),
    )
    timing = Timing()
    finished = continue_requests(
        model,
        [(ids, replace(settings, stream=row)) for row, ids in enumerate(prompts)],
        cache_length=cache_length,
        chunk=chunk,
        prefill=prefill,
        mesh=mesh,
        exits=exits,
        speculate=speculate,
        timing=timing,
    )
    return as_generation([request for _, request in in_order(finished)], timing)


def continue_prompts(
    model: Decoder,
    prompts: Sequence[str],
    *,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    sampling: SamplingConfig,
    stop: Sequence[str] = (),
    bos: bool = True,
    seed: int = 0,
    skip: Collection[int] = (),
    adapters: Sequence[int] = (0,),
    **options: Any,
) -> Iterator[tuple[int, Request]]:
    """Yields each prompt's number and its finished request, in the order they end.

    The texts are those of `generate` with all prompts.

    Args:
      skip: numbers of prompts that are done already; the others' tokens are the same
        with or without them.
      adapters: each prompt is continued once with each of these; with several of them
        the numbers count texts, those of the first prompt first.
      options: options of `continue_requests`.

    Raises:
      UserError, NotFinite: as `generate`.
    """
    if isinstance(stop, str):  # a sequence of strings too, each letter a stop
        raise UserError(f"stop must be a list of non-empty strings, got {stop!r}")
    settings = RequestSettings(
        max_new_tokens=_countable(max_new_tokens),
        sampling=sampling,
        seed=seed,
        stop=tuple(stop),
        stop_tokens=text_ends(tokenizer),
    )
    encoded = encode_prompts(prompts, tokenizer, bos=bos)
    every = list(itertools.product(enumerate(encoded), adapters))
    pending = [number for number in range(len(every)) if number not in skip]
    if skip and not pending:
        return
    # Each text draws from the stream of its prompt's number: what is skipped, or ends
    # earlier, changes nothing in the others.
    requests = []
    for (number, ids), adapter in (every[n] for n in pending):
        requests.append((ids, replace(settings, stream=number, adapter=adapter)))
    finished = continue_requests(model, requests, tokenizer=tokenizer, **options)
    for place, request in finished:
        yield pending[place], request


def continue_requests(
    model: Decoder,
    requests: Sequence[tuple[Sequence[int] | np.ndarray, RequestSettings]],
    *,
    tokenizer: Tokenizer | None = None,
    slots: int | None = None,
    cache_length: int | None = None,
    chunk: int | None = None,
    prefill: str = "exact",
    mesh: Mesh | None = None,
    exits: EarlyExit | None = None,
    speculate: int | None = None,
    on_text: OnText | None = None,
    timing: Timing | None = None,
) -> Iterator[tuple[int, Request]]:
    """Yields each request's place and what became of it, in the order they end.

    Args:
      requests: prompts and their settings.
      slots: requests that are continued at once, at most; None: all.
      timing: is filled in.
      tokenizer, on_text, cache_length, chunk, prefill, mesh, exits, speculate: as of
        `generate`.

    Raises:
      UserError, NotFinite: as `generate_tokens`.
    """
    if not requests:
        raise UserError("prompts is empty: give at least one prompt")
    timing = Timing() if timing is None else timing
    settings = [setting for _, setting in requests]
    if chunk is None:
        # The host checks rarely if text is not streamed and has no stop strings.
        looks = on_text is not None or any(setting.stop for setting in settings)
        chunk = CHUNK if looks else LONG_CHUNK
    if chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    # As wide as they come: an id of another model must not wrap around into range.
    prompts = [np.asarray(ids) for ids, _ in requests]
    length = _fitting_length(prompts, settings, model.config.max_length, cache_length)
    slots = len(prompts) if slots is None else slots
    # Prompts are padded to few widths, so that few programs are compiled.
    width = max(_SMALLEST_BUCKET, 1 << (max(map(len, prompts)) - 1).bit_length())
    width = min(width, length)
    together = slots * width
    if slots < len(prompts):
        together = min(together, max(width, _READ_AT_ONCE))
    engine = Engine(
        # Convert once: the programs would round the weights for each token.
        in_compute_dtype(model),
        EngineConfig(
            slots=slots,
            length=length,
            prefill_tokens=together,
            steps=chunk,
            prefill=prefill,
            exit=None if exits is None else exits.rule,
            missing=None if exits is None else exits.missing,
            speculate=speculate,
        ),
        tokenizer=tokenizer,
        exit_head=None if exits is None else exits.head,
        mesh=mesh,
    )
    for ids, setting in zip(prompts, settings, strict=True):
        # Refused before anything is generated: one prompt of thousands may be wrong.
        engine.check(ids, setting, name=f"prompt {setting.stream + 1}")
    places = {
        engine.submit(ids, setting): place
        for place, (ids, setting) in enumerate(zip(prompts, settings, strict=True))
    }
    timing.rows, timing.prompt_tokens = len(prompts), sum(map(len, prompts))
    shown = [0] * len(prompts)
    while engine.busy:
        for phase, half in (("prefill", engine.read), ("decode", engine.decode)):
            with timing.measure(phase, engine):
                news = half()
            timing.new_tokens = engine.counts.new_tokens
            for request in news:
                place = places[request]
                if request.reason == "not_finite":
                    raise NotFinite(
                        "the model's logits are not finite at new token "
                        f"{len(request.tokens) + 1} of prompt "
                        f"{request.settings.stream + 1}: its parameters hold NaN or "
                        "infinities, or its activations overflow; take a checkpoint "
                        "from before it diverged"
                    )
                piece = request.text[shown[place] :]
                if piece and on_text is not None:
                    on_text(place, piece)
                shown[place] += len(piece)
                if request.done:
                    yield place, request


def in_order(finished: Iterable[tuple[int, Request]]) -> list[tuple[int, Request]]:
    """Returns finished requests in the order of their prompts."""
    return sorted(finished, key=lambda pair: pair[0])


def as_generation(requests: Sequence[Request], timing: Timing) -> Generation:
    """Collects what became of requests."""
    aux: dict[str, float] = {}
    for request in requests:
        for name, value in request.aux.items():
            aux[name] = max(value, aux.get(name, value))
    # The first token comes from the prompt, which all loops have read.
    later = [n for request in requests for n in request.loops[1:]]
    if later:
        aux["mean loops a token"] = float(np.mean(later))
    reasons: Any = [request.reason for request in requests]
    return Generation(
        texts=[request.text for request in requests],
        tokens=[np.asarray(request.tokens, np.int32) for request in requests],
        finish_reasons=reasons,
        timing=timing,
        aux=aux,
        loops=[request.loops for request in requests] if requests[0].loops else None,
    )


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, *, bos: bool
) -> list[Int32[np.ndarray, " _"]]:
    """Encodes prompts as `generate` reads them; see there."""
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of texts, got one text: wrap it in [ ]")
    encoded = []
    for row, ids in enumerate(tokenizer.encode_many(prompts)):
        if ids.size == 0 and tokenizer.bos is None:
            raise UserError(
                f"prompt {row + 1} is empty, and the tokenizer has no BOS token to "
                "start from: give it some text"
            )
        # An empty prompt needs a token to start from, whatever `bos` says.
        if tokenizer.bos is not None and (bos or ids.size == 0):
            ids = np.concatenate([np.array([tokenizer.bos], np.int32), ids])
        encoded.append(ids)
    return encoded


def _fitting_length(
    prompts: list[np.ndarray],
    settings: list[RequestSettings],
    most: int | None,
    cache_length: int | None,
) -> int:
    """Returns how many tokens a slot holds; a last new token is never read."""
    needs = [
        (ids.size + setting.max_new_tokens - 1, ids.size, setting)
        for ids, setting in zip(prompts, settings, strict=True)
    ]
    needed, size, setting = max(needs, key=lambda need: need[0])
    for name, limit in {"cache": cache_length, "model": most}.items():
        if limit is not None and needed > limit:
            raise UserError(
                f"prompt {setting.stream + 1} has {size} tokens and needs {needed} "
                f"positions for {setting.max_new_tokens} new ones, but the {name} "
                f"has only {limit}: shorten the prompt or request fewer new tokens"
            )
    _countable(needed)
    # In steps, so that a few more new tokens do not compile another program.
    rounded = -(-needed // _CACHE_STEP) * _CACHE_STEP
    return cache_length or min(rounded, most or rounded)


def _countable(positions: int) -> int:
    if positions > LARGEST_SIZE:
        raise UserError(
            f"the new tokens take {positions} positions, which exceed "
            f"{LARGEST_SIZE}: request fewer new tokens"
        )
    return positions
