"""The dimension letters and array aliases that every other file uses.

| letter | meaning               | letter | meaning                      |
|--------|-----------------------|--------|------------------------------|
| B      | batch                 | H      | query heads                  |
| T      | query positions       | K      | key heads                    |
| S      | key positions         | E      | head width                   |
| C      | chunk length          | F      | feed-forward width           |
| G      | chunks, T = G * C     | V      | vocabulary                   |
| D      | model width           | L, R   | layers, recursion steps      |

Time is axis 1: [B, T, ...] and [B, T, H, E]. Positions and lengths count tokens.
"""

from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Bool, Float, Int, PyTree

Array = jax.Array
Cache = PyTree[Any]
"""A variant's cache: one frozen pytree made by `init_cache`, opaque to callers."""

IGNORED = -1
"""The target value that no loss counts."""


class Tokens(NamedTuple):
    """The properties of tokens that a stack gets in addition to their embeddings.

    Attributes:
      ids: token ids.
      segments: document number of each position, or None when attention and
        recurrences run across documents.
      lengths: how many of the T positions of a row are real; the rest is padding on
        the right, advances no state and yields values without meaning. None: all.
    """

    ids: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None = None
    lengths: Int[Array, " B"] | None = None


Missing = Literal["propagate", "share", "skip"]
"""Keys and values that a token lacks at depths which it did not run: made of its last
state; those of loop 1, as the model was trained with; or none: it is not seen there."""


class LoopPositions(NamedTuple):
    """Positions of tokens of a looped stack that are at different loops.

    Attributes:
      loop: the loop that a token runs next, from 0.
      position: position of the token in its row.
      live: whether there is a token: others read and write nothing.
    """

    loop: Int[Array, "B T"]
    position: Int[Array, "B T"]
    live: Bool[Array, "B T"]


class Batch(NamedTuple):
    """A training batch; `targets` are the next tokens, `IGNORED` where none counts."""

    ids: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None = None


Scalar = Float[Array, ""]
