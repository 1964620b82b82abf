"""Keys and values of past tokens: full caches and ring buffers under one rule.

Slot s of a cache with S slots holds, once a row has seen n tokens, the token at the
largest position p < n with p mod S = s. When S covers the whole sequence that is p = s;
when S covers a window only, it is a ring buffer. Nothing else tells the two apart.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from recurjax.layers.mesh import keep_slots_apart
from recurjax.types import Array


class KeyValueCache(NamedTuple):
    """Keys and values of a group of stacked layers, and where the rows stand.

    Attributes:
      keys: after position encoding. S = 0 is the training cache: nothing is kept.
      values: as keys.
      position: how many tokens each row has seen.
      layer: which of the L stacked layers reads and writes.
      hidden: slots that no query of this layer sees, for tokens that left the stack
        before it and wrote nothing there; None: there are none.
    """

    keys: Float[Array, "L B S K E"]
    values: Float[Array, "L B S K E"]
    position: Int[Array, " B"]
    layer: Int[Array, ""]
    hidden: Bool[Array, "B S"] | None = None

    @property
    def slots(self) -> int:
        """S, the number of tokens that fit."""
        return self.keys.shape[2]


def empty_key_value_cache(
    layers: int, batch: int, slots: int, key_heads: int, head_width: int, dtype
) -> KeyValueCache:
    """Makes a cache of zeros at position 0."""
    shape = (layers, batch, slots, key_heads, head_width)
    return KeyValueCache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        position=jnp.zeros(batch, jnp.int32),
        layer=jnp.zeros((), jnp.int32),
    )


def slot_positions(slots: int, seen: Int[Array, " B"]) -> Int[Array, "B S"]:
    """Returns the position each slot holds after `seen` tokens; negative: empty."""
    # The newest token's slot holds `newest`, the slot before it newest - 1, and so on
    # around the ring; below zero no token has been written.
    newest = seen[:, None] - 1
    return newest - (newest - jnp.arange(slots)) % slots


def write(
    cache: KeyValueCache,
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    lengths: Int[Array, " B"] | None,
) -> KeyValueCache:
    """Writes the first `lengths` of T new tokens at each row's own position.

    Padding is dropped, and so are tokens that later ones of the same call would
    overwrite (T > S). `position` stays: the stack moves it after its last layer.
    """
    B, T = k.shape[:2]
    count = jnp.full(B, T) if lengths is None else lengths
    if B * T == 1:
        # A scatter of one token becomes slices in XLA, for which XLA:CPU copies all of
        # the cache several times; a second token, dropped as padding, keeps it one.
        k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
    offset = jnp.arange(k.shape[1])
    # Not padding, and not a token that a later one of this call would overwrite: a
    # scatter does not say which of two writes to a slot wins.
    kept = (offset < count[:, None]) & (offset >= count[:, None] - cache.slots)
    slot = (cache.position[:, None] + offset) % cache.slots
    slot = jnp.where(kept, slot, cache.slots)  # out of range: dropped
    index = (cache.layer, jnp.arange(B)[:, None], slot)
    keys = cache.keys.at[index].set(k.astype(cache.keys.dtype), mode="drop")
    values = cache.values.at[index].set(v.astype(cache.values.dtype), mode="drop")
    return cache._replace(keys=keep_slots_apart(keys), values=keep_slots_apart(values))


def read_layer(
    stacked: Shaped[Array, "L B ..."], layer: Int[Array, ""]
) -> Shaped[Array, "B ..."]:
    """Returns the entry of one layer."""
    return stacked[layer]


def write_layer(
    stacked: Shaped[Array, "L B ..."],
    layer: Int[Array, ""],
    new: Shaped[Array, "B ..."],
) -> Shaped[Array, "L B ..."]:
    """Replaces the entry of one layer."""
    return stacked.at[layer].set(new.astype(stacked.dtype))
