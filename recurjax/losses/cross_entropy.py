"""Next-token cross-entropy, with the vocabulary in one piece or in chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels import reductions
from recurjax.layers.mesh import as_matrix
from recurjax.model import Decoder
from recurjax.types import IGNORED, Array


class TokenLosses(NamedTuple):
    """Per-position values; both are 0 where the target is `IGNORED`.

    Attributes:
      nats: -log p(target).
      log_normalizer: log sum exp of the logits.
    """

    nats: Float[Array, "B T"]
    log_normalizer: Float[Array, "B T"]


def token_losses(
    model: Decoder,
    x: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    chunks: int = 1,
) -> TokenLosses:
    """Computes -log softmax(head(x))[target] in at least float32.

    Args:
      model: gives head, padding and soft cap.
      x: states from `model.hidden`.
      targets: token ids, or IGNORED.
      chunks: pieces of the vocabulary. With 1 the logits and their gradient take
        2 * 4 B T V bytes; with n > 1 they are made piece by piece, forward and again
        backward, and take 2 * 4 B T V / n bytes at a time, for one more product with
        the head.
    """
    # Rows of one matrix, for the reason given in `linear`.
    x = as_matrix(x)  # [B T, D]
    # An ignored position looks up label 0, any valid row, and is set to 0 at the end: a
    # gather of -1 would take the last column instead.
    counted = (targets != IGNORED).reshape(x.shape[:-1])
    labels = jnp.where(counted, targets.reshape(x.shape[:-1]), 0)
    if chunks == 1:
        logits = model.logits(x)
        log_normalizer = reductions.logsumexp(logits)
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    else:
        log_normalizer, chosen = _chunked(model, x, labels, chunks)
    nats = jnp.where(counted, log_normalizer - chosen, 0)
    log_normalizer = jnp.where(counted, log_normalizer, 0)
    return TokenLosses(
        nats=nats.reshape(targets.shape),
        log_normalizer=log_normalizer.reshape(targets.shape),
    )


def at_targets(
    x: Float[Array, "B T D"], targets: Int[Array, "B T"], most: int
) -> tuple[Float[Array, "B A D"], Int[Array, "B A"]]:
    """Gathers the states and targets of the counted positions, in order.

    The head then computes A = min(most, T) logits a row instead of T.

    Args:
      most: counted targets that a row has at most. A row with more of them gets states
        that are NaN, so that no target is dropped unseen.
    """
    counted = targets != IGNORED
    # Equal values come in the order of their positions.
    _, at = jax.lax.top_k(counted.astype(jnp.int32), min(most, targets.shape[1]))
    fits = counted.sum(1) <= most
    x = jnp.take_along_axis(x, at[..., None], axis=1)
    x = jnp.where(fits[:, None, None], x, jnp.nan)
    return x, jnp.take_along_axis(targets, at, axis=1)


def _chunked(model: Decoder, x, labels, chunks: int) -> tuple[Array, Array]:
    V = model.config.vocabulary
    head = model.head_weight()  # [D, W]
    D, W = head.shape
    # Rounded up: the last pieces may have columns beyond the head, which are padding.
    width = -(-W // chunks)
    head = jnp.pad(head, ((0, 0), (0, width * chunks - W)))
    # Chunk i holds the columns i, i + chunks, ...: the long axis stays the sharded one.
    pieces = jnp.moveaxis(head.reshape(D, width, chunks), 2, 0)  # [chunks, D, V/chunks]
    dtype = jnp.promote_types(x.dtype, jnp.float32)

    # Under checkpoint a piece's logits are recomputed in the backward pass; kept, those
    # of all pieces would fill the memory that chunks are there to save.
    @jax.checkpoint
    def add_piece(carry, piece_and_number):
        piece, number = piece_and_number
        largest, total, chosen = carry
        logits = jnp.einsum(
            "...d,dv->...v", x, piece.astype(x.dtype), preferred_element_type=dtype
        )
        logits = model.cap(logits)
        columns = number + chunks * jnp.arange(width)
        logits = jnp.where(columns < V, logits, -jnp.inf)
        # The streaming log-sum-exp: the sum so far is in units of exp(largest so far),
        # and is rescaled whenever a piece has a larger logit. The peak cancels in the
        # result, so it needs no gradient.
        peak = jax.lax.stop_gradient(jnp.maximum(largest, reductions.largest(logits)))
        total = total * jnp.exp(largest - peak)
        total += jnp.exp(logits - peak[..., None]).sum(-1)
        # Only one piece contains the target; the others look up a wrong column, whose
        # value is dropped.
        here = labels % chunks == number
        target = jnp.take_along_axis(logits, (labels // chunks)[..., None], axis=-1)
        chosen = jnp.where(here, target[..., 0], chosen)
        return (peak, total, chosen), None

    # The least finite number rather than -inf: exp(-inf - -inf) would be NaN.
    start = jnp.full(labels.shape, jnp.finfo(dtype).min, dtype)
    zeros = jnp.zeros(labels.shape, dtype)
    (largest, total, chosen), _ = jax.lax.scan(
        add_piece, (start, zeros, zeros), (pieces, jnp.arange(chunks))
    )
    return largest + jnp.log(total), chosen
