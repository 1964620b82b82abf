"""Keys and values of past tokens: full caches and ring buffers under one rule.

Slot s of a cache with S slots holds, once a row has seen n tokens, the token at the
largest position p < n with p mod S = s. When S covers the whole sequence that is p = s;
when S covers a window only, it is a ring buffer. Nothing else tells the two apart.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, Shaped

from pallas_kernels import mesh_cut, target
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


def slots_for(length: int, window: int | None, *, ahead: int = 0) -> int:
    """Returns S of a cache for `length` tokens: a ring buffer under a window.

    Args:
      window: how far back a token sees, so that a ring holds it and `window` before it.
      ahead: tokens that may be written after one that still reads.
    """
    return length if window is None else min(length, window + 1 + ahead)


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
    offset = jnp.arange(T)
    # Not padding, and not a token that a later one of this call would overwrite: a
    # scatter does not say which of two writes to a slot wins.
    kept = (offset < count[:, None]) & (offset >= count[:, None] - cache.slots)
    slot = (cache.position[:, None] + offset) % cache.slots
    slot = jnp.where(kept, slot, dropped_slots(cache.slots, T))
    put = partial(_put_tokens, layer=cache.layer, slot=slot)
    if _lies_by_slots(cache):
        one_by_one = T <= _MOST_TOKENS and _rows_of_a_device(cache) * T <= _MOST_WRITES
        # What each slot holds then: one of these tokens, or, below 0, what it has.
        token = slot_positions(cache.slots, cache.position + count)
        token = token - cache.position[:, None]
        by_place = (_put_slices, slot) if one_by_one else (_put_layer, token)
        put = partial(_on_each_device, *by_place, cache.layer)
    keys, values = (
        keep_slots_apart(put(stacked, new=new.astype(stacked.dtype)))
        for stacked, new in ((cache.keys, k), (cache.values, v))
    )
    return cache._replace(keys=keys, values=values)


def dropped_slots(slots: int, tokens: int) -> Int[Array, " T"]:
    """Returns a slot for each token of a call that is to be written nowhere.

    All are out of range, and no two are one: told that its places are unique, a scatter
    needs no order, for which XLA for GPUs sorts them and their tokens in every call
    that is to be deterministic.
    """
    return slots + jnp.arange(tokens)


def _put_tokens(
    stacked: Float[Array, "L B S K E"],
    *,
    layer: Int[Array, ""],
    slot: Int[Array, "B T"],
    new: Float[Array, "B T K E"],
) -> Float[Array, "L B S K E"]:
    """Writes tokens by a scatter."""
    (B, T), S = slot.shape, stacked.shape[2]
    if B * T == 1:
        # A scatter of one token becomes slices in XLA, for which XLA:CPU copies all of
        # the cache several times; a second token, dropped as padding, keeps it one.
        slot = jnp.pad(slot, ((0, 0), (0, 1)), constant_values=S + 1)
        new = jnp.pad(new, ((0, 0), (0, 1), (0, 0), (0, 0)))
    index = (layer, jnp.arange(B)[:, None], slot)
    return stacked.at[index].set(new, mode="drop", unique_indices=True)


_LANES = 128
_MOST_TOKENS, _MOST_WRITES = 8, 512
"""Tokens of a row, and of a device, that are written one by one: each is an operation
to compile."""
_BY_SLOTS = Layout((0, 1, 3, 4, 2))
"""Of a cache whose slots lie side by side."""


def _lies_by_slots(cache: KeyValueCache) -> bool:
    """Whether slots lie side by side better than channels: on TPU, of narrow heads.

    A TPU's memory has 128 numbers side by side. A cache comes with its slots there when
    heads have fewer channels, but a scatter wants channels, fills them up, and keeps
    all layers so, copied forth and back in every call (SmolLM2: 2.67 times the cache).
    """
    _, B, S, K, E = cache.keys.shape
    if not target.tiles_memory() or E % _LANES == 0 or S < _LANES:
        return False
    cut = _cut(B, K)
    # What cuts neither rows nor heads may cut the slots.
    return cut is None or not cut.left


def _rows_of_a_device(cache: KeyValueCache) -> int:
    _, B, _, K, _ = cache.keys.shape
    cut = _cut(B, K)
    if cut is None:
        return B
    return B // math.prod(cut.mesh.shape[axis] for axis in cut.rows)


def _cut(rows: int, heads: int) -> mesh_cut.Cut | None:
    return mesh_cut.find_cut(rows, lambda shards: heads % shards == 0)


def _on_each_device(
    put: Callable[..., Array],
    places: Int[Array, "B P"],
    layer: Int[Array, ""],
    stacked: Float[Array, "L B S K E"],
    *,
    new: Float[Array, "B T K E"],
) -> Float[Array, "L B S K E"]:
    """Has each device write those of its own rows and heads."""
    arguments = (stacked, layer, places, new)
    cut = _cut(places.shape[0], new.shape[2])
    if cut is None:
        return put(*arguments)
    cache = P(None, cut.by_row, None, cut.columns)
    token = P(cut.by_row, None, cut.columns)
    # Left to itself, the compiler would gather the cache for a slice of it.
    specs = (cache, P(), P(cut.by_row), token)
    return mesh_cut.run(cut, put, specs, cache, *arguments)


def _put_slices(
    stacked: Float[Array, "L B S K E"],
    layer: Int[Array, ""],
    slot: Int[Array, "B T"],
    new: Float[Array, "B T K E"],
) -> Float[Array, "L B S K E"]:
    """Writes tokens one by one."""
    _, _, S, K, E = stacked.shape
    # A loop over them would bring the scatter's layout back.
    for row, t in itertools.product(*map(range, slot.shape)):
        # Out of range it is the last slot, which keeps what it has.
        at = (layer, row, jnp.minimum(slot[row, t], S - 1), 0, 0)
        old = jax.lax.dynamic_slice(stacked, at, (1, 1, 1, K, E))
        token = jnp.where(slot[row, t] < S, new[row, t][None, None, None], old)
        stacked = jax.lax.dynamic_update_slice(stacked, token, at)
    return with_layout_constraint(stacked, _BY_SLOTS)


def _put_layer(
    stacked: Float[Array, "L B S K E"],
    layer: Int[Array, ""],
    token: Int[Array, "B S"],
    new: Float[Array, "B T K E"],
) -> Float[Array, "L B S K E"]:
    """Writes a layer anew: each slot the token that it holds now, or what it has."""
    written = jnp.maximum(token, 0)[:, :, None, None]
    taken = jnp.take_along_axis(new, written, axis=1)
    whole = jnp.where(token[:, :, None, None] >= 0, taken, stacked[layer])
    whole = with_layout_constraint(whole, Layout((0, 2, 3, 1)))
    stacked = jax.lax.dynamic_update_index_in_dim(stacked, whole, layer, 0)
    return with_layout_constraint(stacked, _BY_SLOTS)


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
