"""Continues many texts on an engine: each is handed out when it ends."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer, text_ends
from recurjax.errors import UserError
from recurjax.exits import ExitHead, ExitRule
from recurjax.inference.engine import Engine, EngineConfig, Request, RequestSettings
from recurjax.inference.generate import encode_prompts
from recurjax.inference.generate_tokens import NotFinite, rounded_length
from recurjax.inference.sampling import SamplingConfig
from recurjax.inference.timing import Timing
from recurjax.model import Decoder
from recurjax.types import Missing


def continue_prompts(
    model: Decoder,
    prompts: Sequence[str],
    *,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    sampling: SamplingConfig,
    stop: Sequence[str],
    bos: bool,
    seed: int,
    slots: int,
    prefill: str = "exact",
    mesh: Mesh | None = None,
    rule: ExitRule | None = None,
    missing: Missing | Literal["verify"] | None = None,
    exit_head: ExitHead | None = None,
    skip: Collection[int] = (),
    timing: Timing,
) -> Iterator[tuple[int, Request]]:
    """Yields each prompt's number and what became of it, in the order they end.

    The tokens of a prompt are those of `generate` with all prompts in one batch.

    Args:
      slots: prompts that are continued at once, at most.
      rule, missing, exit_head: of tokens that leave a recursive model early, see
        `EngineConfig`.
      skip: numbers of prompts that are done already; the others' tokens are the same
        with or without them.
      timing: is filled in; the engine reads and decodes in turns, so its decode seconds
        are those of both.

    Raises:
      UserError: as `generate`; a prompt and its new tokens do not fit the model, or
        so many slots the memory.
      NotFinite: logits are NaN or infinite.
    """
    settings = RequestSettings(
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop=tuple(stop),
        stop_tokens=text_ends(tokenizer),
    )
    encoded = encode_prompts(prompts, tokenizer, bos=bos)
    left = [number for number in range(len(encoded)) if number not in skip]
    if not left:
        return
    # The last new token is drawn and never read, so it needs no place in the cache.
    longest = max(len(encoded[number]) for number in left)
    length = rounded_length(longest + max_new_tokens - 1, model.config.max_length)
    config = EngineConfig(
        slots=min(slots, len(left)),
        length=length,
        # No wider than the longest prompt: each width is a program to compile.
        prefill_tokens=min(512, max(16, 1 << (longest - 1).bit_length())),
        prefill=prefill,
        exit=rule,
        missing=missing,
    )
    with timing.measure("compile"):
        engine = Engine(
            model, config, tokenizer=tokenizer, mesh=mesh, exit_head=exit_head
        )
    numbers: dict[Request, int] = {}
    for number in left:
        # Each prompt draws from the stream of its own number: what is skipped, or ends
        # earlier, changes nothing in the others.
        own = replace(settings, stream=number)
        try:
            numbers[engine.submit(encoded[number], own)] = number
        except UserError as error:
            raise UserError(f"prompt {number + 1}: {error}") from None
    timing.rows = len(left)
    timing.prompt_tokens = sum(len(encoded[number]) for number in left)
    while engine.busy:
        began = time.perf_counter()
        news = engine.step()
        timing.decode_seconds += time.perf_counter() - began
        timing.new_tokens = engine.counts.new_tokens
        # Every request that got a token is told of; most go on.
        for request in news:
            if request.reason == "not_finite":
                raise NotFinite(
                    f"the model's logits are not finite at new token "
                    f"{len(request.tokens) + 1} of prompt {numbers[request] + 1}: take "
                    "a checkpoint from before it diverged"
                )
            if request.done:
                yield numbers[request], request
