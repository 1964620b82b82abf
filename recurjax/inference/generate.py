"""Continues texts with any model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32, Key

from recurjax.data.tokenizers import Tokenizer, first_token, text_ends
from recurjax.errors import UserError
from recurjax.inference.continuation import Continuation
from recurjax.inference.exit_decoding import EarlyExit
from recurjax.inference.generate_tokens import (
    CHUNK,
    LONG_CHUNK,
    FinishReason,
    generate_tokens,
)
from recurjax.inference.sampling import PLAIN, SamplingConfig
from recurjax.inference.timing import Timing
from recurjax.model import Decoder
from recurjax.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Continued prompts, in the prompts' order.

    Attributes:
      texts: what follows each prompt, up to a stop string.
      tokens: the new tokens, those of `text_ends` or of a stop string's end included.
      finish_reasons: what ended each row.
      timing: seconds and tokens a second.
      aux, loops: see `TokenGeneration`.
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
    seed: int | Key[Array, " B"] = 0,
    on_text: Callable[[int, str], None] | None = None,
    cache_length: int | None = None,
    chunk: int | None = None,
    prefill: str = "exact",
    mesh: Mesh | None = None,
    exits: EarlyExit | None = None,
) -> Generation:
    """Continues texts, all in one batch.

        made = generate(model, ["To be,"], tokenizer=tokenizer, max_new_tokens=100)
        print("To be," + made.texts[0])

    Args:
      model: any variant.
      max_new_tokens: for each row; a token of `text_ends` or a stop string may end it
        earlier.
      stop: a text ends before the first of these strings, which may span tokens.
      bos: put the tokenizer's BOS, if it has one, before each prompt, as before
        documents in training; False: the prompts continue a text from its middle. An
        empty prompt always starts from BOS.
      seed: an int, or one random stream a row: see `generate_tokens`.
      on_text: called with the row and its next piece of text; they join to `texts`.
      cache_length, chunk: see `generate_tokens`, which looks at the tokens as seldom
        without `on_text` and `stop` as without `on_token`; prefill: its `prefill_by`.
      mesh, exits: see `generate_tokens`.

    Raises:
      UserError: see `generate_tokens`; also an empty prompt without a BOS, and a
        tokenizer that the model does not fit.
    """
    # A string is a sequence of strings too, each letter a stop.
    if isinstance(stop, str) or not all(stop):
        raise UserError(f"stop must be a list of non-empty strings, got {stop!r}")
    # A model may have rows for more tokens, which are padding; the other way round an
    # id would have no row.
    if tokenizer.vocabulary > model.config.vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary} tokens, the model only "
            f"{model.config.vocabulary}: use the tokenizer it was trained with"
        )
    encoded = encode_prompts(prompts, tokenizer, bos=bos)
    # Decoded as what follows the prompt, so that its first token keeps its space.
    rows = [Continuation(tokenizer, ids, stop) for ids in encoded]
    texts = [""] * len(rows)

    def show(row: int, piece: str) -> None:
        texts[row] += piece
        if piece and on_text is not None:
            on_text(row, piece)

    ends = text_ends(tokenizer)

    def on_token(row: int, token: int) -> bool:
        # What ends a text is none of it.
        if token in ends:
            return False
        show(row, rows[row].push(token))
        return rows[row].stopped

    # The host looks seldom where nobody waits for text and no stop string ends a row.
    if chunk is None:
        chunk = CHUNK if stop or on_text is not None else LONG_CHUNK
    made = generate_tokens(
        model,
        encoded,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos=ends,
        seed=seed,
        on_token=on_token,
        cache_length=cache_length,
        chunk=chunk,
        prefill_by=prefill,
        mesh=mesh,
        exits=exits,
    )
    # What was held back, in case it began a stop string, is text after all.
    for row, continuation in enumerate(rows):
        show(row, continuation.finish())
    return Generation(
        texts=texts,
        tokens=made.tokens,
        finish_reasons=made.finish_reasons,
        timing=made.timing,
        aux=made.aux,
        loops=made.loops,
    )


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, *, bos: bool
) -> list[Int32[np.ndarray, " _"]]:
    """Encodes prompts as `generate` reads them; see there."""
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of texts, got one text: wrap it in [ ]")
    encoded, first = [], first_token(tokenizer)
    for row, ids in enumerate(tokenizer.encode_many(prompts)):
        if ids.size == 0 and first is None:
            raise UserError(
                f"prompt {row + 1} is empty, and the tokenizer has no BOS token to "
                "start from: give it some text"
            )
        # An empty prompt needs a token to start from, whatever `bos` says.
        begin = first if ids.size == 0 else tokenizer.bos if bos else None
        if begin is not None:
            ids = np.concatenate([np.array([begin], np.int32), ids])
        encoded.append(ids)
    return encoded
