"""Loss, perplexity and bits per byte of a text."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from recurjax.cross_entropy import token_losses
from recurjax.model import Decoder
from recurjax.training.objective import NextToken, Objective
from recurjax.types import IGNORED, Array, Batch

AS_CALLED = NextToken()
"""The model as it is called, its logits in one piece."""


class Score(NamedTuple):
    """How well a model predicts a text.

    Attributes:
      loss: nats a token.
      perplexity: exp(loss).
      bits_per_byte: nats of the tokens that stand for text, over ln 2 times their
        bytes. Special tokens count no bytes, and their nats are left out.
      tokens: predicted.
      bytes: that they stand for.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int


def score(
    model: Decoder,
    batches: Iterable[Batch],
    *,
    token_bytes: Int[np.ndarray, " V"],
    objective: Objective = AS_CALLED,
    between: Callable[[], None] = lambda: None,
) -> Score:
    """Scores rows that each start without context.

    Args:
      model: any variant.
      batches: from `Dataset.loader("validation", ...)`, on the model's mesh.
      token_bytes: bytes that each token stands for.
      objective: how the model is run: of an experiment's, the states and the pieces of
        the vocabulary.
      between: called after each batch.
    """
    sizes = jnp.asarray(token_bytes, jnp.int32)
    sums = np.zeros(4, np.float64)
    for batch in batches:
        of_batch = batch_sums(model, batch, sizes, objective=objective)
        sums += np.asarray(of_batch, np.float64)
        between()
    nats, tokens, text_nats, text_bytes = (float(x) for x in sums)
    if tokens == 0:
        raise ValueError("score: there are no tokens to predict")
    loss = nats / tokens
    return Score(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=bits_per_byte(text_nats, text_bytes),
        tokens=int(tokens),
        bytes=int(text_bytes),
    )


def bits_per_byte(nats: float, text_bytes: float) -> float:
    """Computes nats / (ln 2 * bytes), of `text_sums`; NaN of no text."""
    return nats / math.log(2) / text_bytes if text_bytes else math.nan


def text_sums(
    nats: Float[Array, "*B"], targets: Int[Array, "*B"], sizes: Int[Array, " V"]
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sums the nats of the targets that stand for text, and their bytes.

    Source: nanochat's count. Special tokens have no bytes, and their nats, as those of
    targets that are IGNORED, are left out.

    Args:
      sizes: bytes that each token stands for.
    """
    counted = targets != IGNORED
    size = jnp.where(counted, sizes[jnp.where(counted, targets, 0)], 0)
    return jnp.where(size > 0, nats, 0).sum(), size.sum()


@partial(jax.jit, static_argnames="objective")
def batch_sums(
    model: Decoder, batch: Batch, sizes: Int[Array, " V"], *, objective: Objective
) -> Float[Array, "4"]:
    """Returns nats, tokens, nats of tokens with bytes, bytes; over one batch."""
    x = objective.states(model, batch)
    chunks = objective.vocabulary_chunks
    nats = token_losses(model, x, batch.targets, chunks=chunks).nats
    counted = batch.targets != IGNORED
    sums = [nats.sum(), counted.sum(), *text_sums(nats, batch.targets, sizes)]
    return jnp.stack([x.astype(jnp.float32) for x in sums])
