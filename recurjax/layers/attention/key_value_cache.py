"""Keys and values of past tokens: full caches and ring buffers under one rule.

Slot s of a cache with S slots holds, once a row has seen n tokens, the token at the
largest position p < n with p mod S = s. When S covers the full sequence that is p = s;
when S covers only a window, it is a ring buffer. There is no other difference between
the two.

New tokens are written first, then attend. Every row has its own position, so masks
compare positions, never indices, which would be wrong wherever a row has a past.
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
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from pallas_kernels import mesh_cut, target
from pallas_kernels.cpu import cache_read
from pallas_kernels.mesh_cut import as_it_lies
from recurjax.layers.attention.softmax import attend, visible_by_position
from recurjax.layers.linear import decodes_on_gpu
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
    """Creates a cache of zeros at position 0."""
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
    stays = (offset < count[:, None]) & (offset >= count[:, None] - cache.slots)
    slot = (cache.position[:, None] + offset) % cache.slots
    slot = jnp.where(stays, slot, dropped_slots(cache.slots, T))
    put = partial(_put_tokens, layer=cache.layer, slot=slot)
    if _lies_by_slots(cache):
        one_by_one = T <= _MOST_TOKENS and _rows_of_a_device(cache) * T <= _MOST_WRITES
        # What each slot holds then: one of these tokens, or, below 0, what it has.
        token = slot_positions(cache.slots, cache.position + count)
        token = token - cache.position[:, None]
        by_place = (_put_slices, slot) if one_by_one else (_put_layer, token)
        put = partial(_on_each_device, *by_place, cache.layer)
    keys, values = (
        keep_slots_apart(put(stacked, new=_held_in(stacked.dtype, new)))
        for stacked, new in ((cache.keys, k), (cache.values, v))
    )
    return cache._replace(keys=keys, values=values)


def _held_in(dtype: DTypeLike, new: Array) -> Array:
    """Returns new in a cache's dtype; in a wider one with the rounding of its own.

    XLA leaves out a rounding that a wider dtype follows.
    """
    held = new.astype(dtype)
    narrow = jnp.finfo(new.dtype)
    if jnp.promote_types(dtype, new.dtype) == new.dtype:
        return held
    bits = {"exponent_bits": narrow.nexp, "mantissa_bits": narrow.nmant}
    return jax.lax.reduce_precision(held, **bits)


def dropped_slots(slots: int, tokens: int) -> Int[Array, " T"]:
    """Returns a slot for each token of a call that is to be written nowhere.

    All are out of range and differ from each other. A scatter with unique indices needs
    no order; otherwise XLA for GPUs sorts indices and tokens in every deterministic
    call.
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
"""For a cache whose slots are contiguous."""


def _lies_by_slots(cache: KeyValueCache) -> bool:
    """Whether slots should be contiguous, not channels: on TPU, of narrow heads.

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
    """Rewrites a layer: each slot gets its new token or keeps its value."""
    written = jnp.maximum(token, 0)[:, :, None, None]
    taken = jnp.take_along_axis(new, written, axis=1)
    updated = jnp.where(token[:, :, None, None] >= 0, taken, stacked[layer])
    updated = with_layout_constraint(updated, Layout((0, 2, 3, 1)))
    stacked = jax.lax.dynamic_update_index_in_dim(stacked, updated, layer, 0)
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


Bias = Callable[[Array, Array], Array | None]
"""From the positions of queries and keys to what is added to the logits, or None."""

_QUERIES = 256
"""Queries of a long prompt that look at once: their logits, B H S numbers a query, are
all that grows with the product of both lengths."""


def attend_to_cache(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    cache: KeyValueCache,
    *,
    scale: float,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> tuple[Float[Array, "B T H E"], KeyValueCache]:
    """Writes T new keys and values at each row's own position, and attends to all.

    Args:
      cache: its `layer` says which entry is written and read.
      window: a key at a distance up to this is visible; None: every earlier key.
      lengths: how many of the T tokens of a row are real; None: all.
      soft_cap, scale: see `attend`.

    Returns:
      What the queries found, and the cache with the new keys and values.

    Raises:
      ValueError: there are more tokens than slots, and the cache is not a ring that
        holds a full window.
    """
    written = write(cache, k, v, lengths)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "bias": bias}
    if q.shape[1] == 1 and _is_prefetched(cache):
        seen = _seen_before_write(k, v, cache, lengths)
        return _attend_to_seen(q, seen, cache, written, **options), written
    o = attend_to_written(q, k, v, cache, written, lengths=lengths, **options)
    return o, written


def attend_to_written(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    before: KeyValueCache,
    written: KeyValueCache,
    *,
    scale: float,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> Float[Array, "B T H E"]:
    """Attends to keys and values that were written already.

    Args:
      k, v: the new ones, as they were written.
      before, written: the cache without and with them, in the same entry.
      scale, window, lengths, soft_cap, bias: as in `attend_to_cache`.
    """
    T, slots = q.shape[1], before.slots
    if lengths is None:  # else how many of them are real is not known here
        check_room("attend_to_cache", T, slots=slots, window=window)
    if written.hidden is not None and T > 1:
        raise ValueError(
            f"attend_to_cache: hiding slots needs one token per call, got {T}"
        )
    plain = bias is None and soft_cap is None and written.hidden is None
    if T == 1 and plain and cache_read.serves(written.keys.dtype):
        newest = before.position + (1 if lengths is None else lengths) - 1
        stored = written.keys, written.values, before.layer, newest
        o = _attend_by_kernel(q[:, 0].astype(jnp.float32), *stored, scale, window)
        return o[:, None].astype(q.dtype)
    seen = _seen(k, v, before, written, window=window, lengths=lengths)
    return _attend_to_seen(
        q,
        seen,
        before,
        written,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        bias=bias,
    )


@partial(jax.custom_jvp, nondiff_argnums=(5, 6))
def _attend_by_kernel(
    q: Float[Array, "B H E"],
    keys: Float[Array, "L B S K E"],
    values: Float[Array, "L B S K E"],
    layer: Int[Array, ""],
    newest: Int[Array, " B"],
    scale: float,
    window: int | None,
) -> Float[Array, "B H E"]:
    """Attends to what each row has read, up to and with its newest token."""
    stored = keys, values, layer, newest
    return cache_read.attend(q, *stored, scale=scale, window=window)


@_attend_by_kernel.defjvp
def _gradients_by_xla(
    scale: float, window: int | None, primals: tuple, tangents: tuple
) -> tuple:
    *arrays, layer, newest = primals
    positions = slot_positions(arrays[1].shape[2], newest + 1)
    mask = visible_by_position(newest[:, None], positions, window=window)

    def look(q: Array, keys: Array, values: Array) -> Array:
        keys, values = (read_layer(x, layer).astype(q.dtype) for x in (keys, values))
        rows = q[:, None], keys, values
        return attend(*rows, scale=scale, causal=False, mask=mask)[:, 0]

    return jax.jvp(look, tuple(arrays), tangents[:3])


def check_room(caller: str, tokens: int, *, slots: int, window: int | None) -> None:
    """Raises ValueError when a cache cannot take `tokens` tokens in one call."""
    # Under a window only a ring that holds all of it may be written over.
    holds_all = window is not None and slots > window
    if slots < tokens and not holds_all:
        raise ValueError(
            f"{caller}: {tokens} tokens in one call exceed the cache's {slots} "
            "slots: make the cache longer"
        )


class _Seen(NamedTuple):
    """Keys and values that some queries may see, and their positions.

    keys, values [B, S, K E]-like as in the cache; positions [B, S], negative: empty.
    """

    keys: Float[Array, "B S K E"]
    values: Float[Array, "B S K E"]
    positions: Int[Array, "B S"]


def _attend_to_seen(
    q: Float[Array, "B T H E"],
    seen: _Seen,
    before: KeyValueCache,
    written: KeyValueCache,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    bias: Bias | None,
) -> Float[Array, "B T H E"]:
    T = q.shape[1]
    positions = before.position[:, None] + jnp.arange(T)
    if decodes_on_gpu(q):
        # By default XLA converts the caches of all layers to the products' preferred
        # layout and back at every token, which moves four times their bytes.
        keys, values = (as_it_lies(x, rows=0, columns=(2,)) for x in seen[:2])
        seen = seen._replace(keys=keys, values=values)
    # Once for all blocks of queries.
    keys, values = (x.astype(q.dtype) for x in seen[:2])
    seen = seen._replace(keys=keys, values=values)

    def look(q: Array, positions: Array, seen: _Seen) -> Array:
        mask = visible_by_position(positions, seen.positions, window=window)
        if written.hidden is not None:
            mask = mask & ~written.hidden[:, None, None, :]
        return attend(
            q,
            seen.keys,
            seen.values,
            scale=scale,
            causal=False,
            mask=mask,
            bias=None if bias is None else bias(positions, seen.positions),
            soft_cap=soft_cap,
        )

    if T <= 2 * _QUERIES:
        return look(q, positions, seen)
    return _look_in_blocks(look, q, positions, seen, window)


def _seen(k, v, before: KeyValueCache, written: KeyValueCache, *, window, lengths):
    """Returns what the new queries may see, in the order of positions if a window."""
    T, slots = k.shape[1], before.slots
    if T == 1 or window is None:
        # After the write slot s holds the token that the ring rule names; padding has
        # none.
        count = T if lengths is None else lengths
        return _Seen(
            read_layer(written.keys, before.layer),
            read_layer(written.values, before.layer),
            slot_positions(slots, before.position + count),
        )
    # A ring may lose, by this write, keys that the first new queries still see: so they
    # are read from the ring before it, from the oldest on, and the new ones after them.
    at = (before.position[:, None] + jnp.arange(slots)) % slots

    def join(ring: Array, new: Array) -> Array:
        ring = read_layer(ring, before.layer)
        old = jnp.take_along_axis(ring, at[:, :, None, None], axis=1)
        return jnp.concatenate([old, new.astype(ring.dtype)], axis=1)

    first = before.position[:, None] - slots
    return _Seen(
        join(before.keys, k),
        join(before.values, v),
        first + jnp.arange(slots + T),
    )


def _is_prefetched(cache: KeyValueCache) -> bool:
    """Whether XLA would take one layer's cache to a TPU's chip to write a token there.

    Then all of it is written back too. Layers that share a stack are too large for it.
    """
    L = cache.keys.shape[0]
    if L > 1 or not target.prefetches_to_vmem():
        return False
    # A copy with the new token has to fit on the chip with everything else: otherwise
    # it is written to memory, which costs more than it saves.
    return cache.keys.nbytes <= target.vmem_bytes() * 2 // 3


def _seen_before_write(k, v, before: KeyValueCache, lengths) -> _Seen:
    """Returns what one new token sees, of the cache before it and of itself.

    The same numbers as after the write, which so has only its own slot to touch.
    """
    count = 1 if lengths is None else lengths
    positions = slot_positions(before.slots, before.position + count)
    is_new = positions == before.position[:, None]

    def join(stacked: Array, new: Array) -> Array:
        old = read_layer(stacked, before.layer)
        return jnp.where(is_new[:, :, None, None], new.astype(old.dtype), old)

    return _Seen(join(before.keys, k), join(before.values, v), positions)


def _look_in_blocks(
    look: Callable[[Array, Array, _Seen], Array],
    q: Array,
    positions: Array,
    seen: _Seen,
    window: int | None,
) -> Array:
    """Lets _QUERIES queries look at a time; under a window, at what they may see."""
    T, S = q.shape[1], seen.positions.shape[1]
    # Under a window the new keys are the last T of S, as the queries are.
    width = S if window is None else min(S, window + _QUERIES)
    begin = jnp.maximum(S - T - (window or 0) + jnp.arange(0, T, _QUERIES), 0)

    def cut(part: Array) -> Array:
        missing = [(0, 0)] * part.ndim
        missing[1] = (0, -T % _QUERIES)
        part = jnp.pad(part, missing)
        return part.reshape(len(part), -1, _QUERIES, *part.shape[2:]).swapaxes(0, 1)

    def block(part) -> Array:
        q, positions, begin = part
        near = seen
        if width < S:
            near = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, begin, width, axis=1), seen
            )
        return look(q, positions, near)

    o = jax.lax.map(block, (cut(q), cut(positions), begin))
    return o.swapaxes(0, 1).reshape(len(q), -1, *q.shape[2:])[:, :T]
