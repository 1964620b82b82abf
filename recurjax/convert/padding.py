"""From Hugging Face's padding, on the left, to recurjax's, on the right, and back."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from recurjax.errors import UserError
from recurjax.types import Tokens


def from_left_padding(
    ids: Int[np.ndarray, "B T"], mask: Int[np.ndarray, "B T"] | Bool[np.ndarray, "B T"]
) -> Tokens:
    """Moves each row's tokens to the front; the pads after them count for nothing.

    Args:
      ids: token ids with pads on the left.
      mask: 1 where a token is real, as `attention_mask`.

    Raises:
      UserError: a row has pads between tokens or after them, or no token.
    """
    real = np.asarray(mask) != 0
    # A pad after a real token: on the left there is none.
    if np.any(real[:, :-1] & ~real[:, 1:]) or not real.any(axis=1).all():
        raise UserError(
            "from_left_padding: each row must be pads, then at least one token"
        )
    lengths = real.sum(axis=1).astype(np.int32)
    moved = np.zeros(np.shape(ids), np.int32)
    for row, length in enumerate(lengths):
        moved[row, :length] = np.asarray(ids)[row, -length:]
    return Tokens(jnp.asarray(moved), lengths=jnp.asarray(lengths))


def to_left_padding(values: np.ndarray, lengths: Int[np.ndarray, " B"]) -> np.ndarray:
    """Moves the first `lengths` values of rows [B, T, ...] to the end; zeros before."""
    moved = np.zeros_like(values)
    # To the end of the row, as the other side counts positions from there.
    for row, length in enumerate(lengths):
        moved[row, values.shape[1] - length :] = values[row, :length]
    return moved
