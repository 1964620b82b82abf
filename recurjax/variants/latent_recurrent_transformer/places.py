"""Where a layer's keys and values come from: the pass itself, a buffer, a cache."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Int

from recurjax.layers.attention import (
    KeyValueCache,
    attend,
    attend_to_cache,
    visible_by_position,
)
from recurjax.types import Array
from recurjax.variants.latent_recurrent_transformer.recurrence import (
    Positions,
    indices,
    put,
)


class Whole(NamedTuple):
    """All positions of a sequence at once; nothing came before.

    Attributes:
      kept: whether keys and values are handed on, as a buffer's.
      origins: whether the buffer says too what it was made of.
    """

    kept: bool
    origins: bool = False


class Origin(NamedTuple):
    """What the pass with no memory made its keys and values of.

    A memory enters both linearly here, so that it can be added later without another
    pass.

    Attributes:
      keys: before rotation and norm.
      values: as they are attended to.
      gate: g_rec of eq. (3); 0 in layers that the memory does not enter.
    """

    keys: Float[Array, "B T K E"]
    values: Float[Array, "B T K E"]
    gate: Float[Array, "B T K"]


class Buffer(NamedTuple):
    """Keys and values of all positions; a pass over some of them renews theirs.

    Attributes:
      keys, values: as they are attended to.
      origin: see `Origin`; None where nothing is to be refreshed.
    """

    keys: Float[Array, "B T K E"]
    values: Float[Array, "B T K E"]
    origin: Origin | None = None


Place = Whole | Buffer | KeyValueCache


def attend_at(
    q: Float[Array, "B n H E"],
    k: Float[Array, "B n K E"],
    v: Float[Array, "B n K E"],
    place: Place,
    *,
    positions: Positions | None,
    window: int,
    segments: Int[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B n H E"], Buffer | KeyValueCache | None]:
    """Writes fresh keys and values, then attends to all that is visible.

    Args:
      place: `Whole` (n = T), a `Buffer` whose `positions` are fresh, or a cache,
        at whose rows' own positions the n tokens go.
      window: how many tokens back a query sees.
      segments: document numbers of all T positions, or None; not with a cache.
      lengths: how many of a cache's n new tokens are real; None: all.

    Returns:
      What was attended, and the place after the writing; None if nothing is kept.
    """
    scale = q.shape[-1] ** -0.5
    if isinstance(place, Whole):
        T = q.shape[1]
        # A window that reaches the first token hides nothing: plain causal attention
        # has faster forms.
        span = window if window < T - 1 else None
        options = {"window": span, "segments": segments}
        o = attend(q, k, v, scale=scale, causal=True, **options)
        return o, Buffer(k, v) if place.kept else None
    if isinstance(place, Buffer):
        # The fresh keys take their places first, so that the chosen positions see each
        # other and all others as these were in the pass before.
        assert positions is not None
        keys, values = put(place.keys, positions, k), put(place.values, positions, v)
        mask = _visible(positions, keys.shape[1], window, segments)
        o = attend(q, keys, values, scale=scale, causal=False, mask=mask)
        return o, place._replace(keys=keys, values=values)
    return attend_to_cache(q, k, v, place, scale=scale, window=window, lengths=lengths)


def _visible(
    positions: Positions, length: int, window: int, segments: Array | None
) -> Array:
    chosen = indices(positions, length)
    # Chosen positions see by their number in the sequence, not by their place in q.
    mask = visible_by_position(
        jnp.asarray(chosen[None]), jnp.arange(length)[None], window=window
    )
    if segments is None:
        return mask
    own = segments[:, chosen]
    return mask & (own[:, :, None] == segments[:, None, :])[:, None]


def slots_of(window: int, length: int) -> int:
    """Returns how many tokens a layer's cache of a sequence of `length` holds."""
    return min(length, window + 1)
