"""Continues prompts with any model: `generate` for texts, `generate_tokens` for ids."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32, Key

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.inference.continuation import Continuation
from recurjax.inference.decoding import DecodeState, decode, prefill
from recurjax.inference.sampling import PLAIN, SamplingConfig, row_keys
from recurjax.model import Decoder, ModelConfig
from recurjax.types import Array, Tokens

FinishReason = Literal["eos", "stop", "length"]
"""What ended a row: the EOS token, a stop string (or `on_token`), the token limit."""

_CHUNK = 16
_CACHE_STEP = 64
"""Cache lengths are multiples of this, so that few programs are compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What generating cost; a row's first new token comes from the prefill.

    Attributes:
      compile_seconds: near 0 when the same shapes were run before.
      prompt_tokens, new_tokens: over all rows.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens read a second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens made a second after each row's first; 0 when there were none."""
        made = self.new_tokens - self.rows
        return made / self.decode_seconds if made else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGeneration:
    """New tokens of each row, an EOS that ended it included."""

    tokens: list[Int32[np.ndarray, " _"]]
    finish_reasons: list[FinishReason]
    timing: Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Continued prompts, in the prompts' order.

    Attributes:
      texts: what follows each prompt, up to a stop string.
      tokens: the new tokens, the EOS or the end of a stop string included.
    """

    texts: list[str]
    tokens: list[Int32[np.ndarray, " _"]]
    finish_reasons: list[FinishReason]
    timing: Timing


def generate(
    model: Decoder,
    prompts: Sequence[str],
    *,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    sampling: SamplingConfig = PLAIN,
    stop: Sequence[str] = (),
    bos: bool = True,
    seed: int | Key[Array, " B"] = 0,
    on_text: Callable[[int, str], None] | None = None,
    cache_length: int | None = None,
    chunk: int = _CHUNK,
) -> Generation:
    """Continues texts, all in one batch.

        made = generate(model, ["To be,"], tokenizer=tokenizer, max_new_tokens=100)
        print("To be," + made.texts[0])

    Args:
      max_new_tokens: for each row; EOS or a stop string may end it earlier.
      stop: a text ends before the first of these strings, which it may span tokens.
      bos: put the tokenizer's BOS, if it has one, before each prompt, as before
        documents in training; False: the prompts continue a text from its middle.
      seed: row r draws from the stream `row_keys(seed, B)[r]`, whatever the other rows
        are; or such streams themselves: `row_keys(0, 8)[3:4]` makes row 3 of 8 alone.
      on_text: called with the row and its next piece of text; they join to `texts`.
      cache_length: how many tokens a row's cache can hold; None: as many as needed.
      chunk: tokens a row between two looks at the text by the host: `on_text` is called
        this seldom, and up to so many tokens are computed in vain after a stop string.

    Raises:
      UserError: no prompt; an empty one without a BOS; a prompt and its continuation are
        longer than the model or the cache allows; a tokenizer of another vocabulary.
    """
    if isinstance(stop, str) or not all(stop):
        raise UserError(f"stop must be a list of strings that are not empty: {stop!r}")
    if tokenizer.vocabulary > model.config.vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} tokens and the model only "
            f"{model.config.vocabulary}: use the tokenizer that it was trained with"
        )
    encoded = _encode(prompts, tokenizer, bos=bos)
    rows = [Continuation(tokenizer, ids, stop) for ids in encoded]
    texts = [""] * len(rows)

    def show(row: int, piece: str) -> None:
        texts[row] += piece
        if piece and on_text is not None:
            on_text(row, piece)

    def on_token(row: int, token: int) -> bool:
        show(row, rows[row].push(token))
        return rows[row].stopped

    made = generate_tokens(
        model,
        encoded,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos=tokenizer.eos,
        seed=seed,
        on_token=on_token,
        cache_length=cache_length,
        chunk=chunk,
    )
    for row, continuation in enumerate(rows):
        show(row, continuation.finish())
    return Generation(
        texts=texts,
        tokens=made.tokens,
        finish_reasons=made.finish_reasons,
        timing=made.timing,
    )


def generate_tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, " _"]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = PLAIN,
    eos: int | None = None,
    seed: int | Key[Array, " B"] = 0,
    on_token: Callable[[int, int], bool] | None = None,
    cache_length: int | None = None,
    chunk: int = _CHUNK,
) -> TokenGeneration:
    """Continues token sequences; see `generate`.

    Args:
      eos: the token that ends a row.
      on_token: called with the row and each new token; True ends the row after it.
    """
    if max_new_tokens < 1 or chunk < 1:
        raise UserError(
            f"max_new_tokens and chunk must be at least 1, got {max_new_tokens}, {chunk}"
        )
    ids = [np.asarray(prompt, np.int32) for prompt in prompts]
    _check_prompts(ids, model.config.vocabulary)
    cache_length = _cache_length(ids, max_new_tokens, cache_length, model.config)
    tokens = _pad(ids, cache_length)
    keys = row_keys(seed, len(ids)) if isinstance(seed, int) else seed
    if keys.shape != (len(ids),):
        raise ValueError(
            f"generate_tokens: {len(ids)} prompts need as many keys, got {keys.shape}"
        )
    arguments = (keys, jnp.asarray(-1 if eos is None else eos, jnp.int32))
    clock = _Clock()

    static = {"sampling": sampling, "cache_length": cache_length}
    prefill.lower(model, tokens, *arguments, **static).compile()
    clock.lap("compile")
    state = prefill(model, tokens, *arguments, **static)
    first = np.asarray(state.newest)[:, None]
    clock.lap("prefill")
    rows = _Rows(len(ids), max_new_tokens, eos, on_token)
    state = rows.take(state, first)

    if not rows.done:
        static = {"sampling": sampling, "chunk": chunk}
        zero = jnp.zeros((), jnp.int32)
        decode.lower(model, state, *arguments, zero, **static).compile()
    clock.lap("compile")
    while not rows.done:
        limit = jnp.asarray(min(chunk, max_new_tokens - rows.drawn), jnp.int32)
        state, made = decode(model, state, *arguments, limit, **static)
        state = rows.take(state, np.asarray(made)[:, : int(limit)])
    clock.lap("decode")

    timing = Timing(
        rows=len(ids),
        prompt_tokens=sum(map(len, ids)),
        new_tokens=sum(map(len, rows.tokens)),
        compile_seconds=clock.seconds["compile"],
        prefill_seconds=clock.seconds["prefill"],
        decode_seconds=clock.seconds["decode"],
    )
    return TokenGeneration(
        tokens=[np.asarray(row, np.int32) for row in rows.tokens],
        finish_reasons=rows.reasons,
        timing=timing,
    )
