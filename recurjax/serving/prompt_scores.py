"""Probabilities of a prompt's own tokens, for a request that wants them echoed.

An engine reads a prompt for the one state after it. Here the head looks at every place
of it, piece by piece, so that requests in the engine's slots continue in between.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pallas_kernels import reductions
from recurjax.inference.compute_dtype import cache_dtype
from recurjax.layers.linear import count_adapters, for_rows
from recurjax.model import Decoder
from recurjax.types import Array, Cache, Tokens

MOST_AT_ONCE = 64
"""Places a piece: of each the logarithms of all V tokens are taken."""


class PromptScores(NamedTuple):
    """The log-probabilities of a prompt, from its second token on.

    Attributes:
      logprobs: log-probability of each token, given those before it.
      top: the likeliest tokens in its place, with theirs.
    """

    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class _Piece(NamedTuple):
    logprobs: Float[Array, " W"]
    top: Int[Array, "W K"]
    top_logprobs: Float[Array, "W K"]


class PromptScorer:
    """Scores prompts by one program, which is compiled when it is made."""

    def __init__(
        self,
        model: Decoder,
        *,
        length: int,
        top: int,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        """Compiles it.

        Args:
          length: tokens that a prompt may have.
          top: how many of the likeliest tokens are returned at each position.
          compiler_options: XLA's compiler options.
        """
        self._model, self._width = model, min(MOST_AT_ONCE, length)

        def start() -> Cache:
            return model.init_cache(1, length, cache_dtype(model))

        def read(
            model: Decoder,
            cache: Cache,
            ids: Array,
            count: Array,
            after: Array,
            adapter: Array | None,
        ):
            model = for_rows(model, adapter)
            x, cache = model.hidden(Tokens(ids, lengths=count), cache)
            return cache, _scores(model.logits(x[0]), after, top=top)

        row = jax.ShapeDtypeStruct((1, self._width), np.int32)
        count = jax.ShapeDtypeStruct((1,), np.int32)
        after = jax.ShapeDtypeStruct((self._width,), np.int32)
        self._several = count_adapters(model) > 0
        adapter = count if self._several else None
        options: Any = dict(compiler_options or {}) or None
        self._fresh = jax.jit(start).lower().compile(compiler_options=options)
        lowered = jax.jit(read, donate_argnums=(1,)).lower(
            model, jax.eval_shape(start), row, count, after, adapter
        )
        self._read = lowered.compile(compiler_options=options)

    def score(
        self, prompt: Int[np.ndarray, " T"], *, adapter: int = 0
    ) -> Iterator[PromptScores | None]:
        """Yields None after each piece, and the scores after the last one."""
        number = np.array([adapter], np.int32) if self._several else None
        cache, scores = self._fresh(), PromptScores([], [])
        # The last token is scored and not read.
        for at in range(0, len(prompt) - 1, self._width):
            ids = prompt[at : at + self._width][: len(prompt) - 1 - at]
            row = np.zeros((1, self._width), np.int32)
            row[0, : len(ids)] = ids
            after = np.zeros(self._width, np.int32)
            after[: len(ids)] = prompt[at + 1 : at + 1 + len(ids)]
            count = np.array([len(ids)], np.int32)
            cache, piece = self._read(self._model, cache, row, count, after, number)
            of_tokens, best, values = (
                np.asarray(leaf)[: len(ids)].tolist() for leaf in piece
            )
            scores.logprobs.extend(of_tokens)
            for tokens, logprobs in zip(best, values, strict=True):
                scores.top.append(list(zip(tokens, logprobs, strict=True)))
            yield None
        yield scores


def _scores(
    logits: Float[Array, "W V"], after: Int[Array, " W"], *, top: int
) -> _Piece:
    wide = logits.astype(jnp.float32)
    sums = reductions.logsumexp(wide, keepdims=True)
    logprobs = jnp.take_along_axis(wide, after[:, None], axis=-1) - sums
    values, best = jax.lax.top_k(wide, top)
    return _Piece(logprobs[:, 0], best.astype(jnp.int32), values - sums)
