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
    """

    kept: bool


class Buffer(NamedTuple):
    """Keys and values of all positions; a pass over some of them renews theirs."""

    keys: Float[Array, "B T K E"]
    values: Float[Array, "B T K E"]


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
        mask = None
        if segments is not None:
            mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        span = window if window < T - 1 else None
        o = attend(q, k, v, scale=scale, causal=True, window=span, mask=mask)
        return o, Buffer(k, v) if place.kept else None
    if isinstance(place, Buffer):
        assert positions is not None
        place = Buffer(put(place.keys, positions, k), put(place.values, positions, v))
        T = place.keys.shape[1]
        mask = _visible(positions, T, window, segments)
        keys, values = place
        return attend(q, keys, values, scale=scale, causal=False, mask=mask), place
    return attend_to_cache(q, k, v, place, scale=scale, window=window, lengths=lengths)


def _visible(
    positions: Positions, length: int, window: int, segments: Array | None
) -> Array:
    chosen = indices(positions, length)
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
