"""Attention of new tokens to a cache of earlier ones: the new are written, then read.

Every row stands at a position of its own, so what a query sees is told by positions
and never by indices: a mask by index would be wrong wherever a row has a past.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.mesh_cut import as_it_lies
from recurjax.layers.attention.key_value_cache import (
    KeyValueCache,
    read_layer,
    slot_positions,
    write,
)
from recurjax.layers.attention.softmax import attend, visible_by_position
from recurjax.layers.linear import decodes_on_gpu
from recurjax.types import Array

Bias = Callable[[Array, Array], Array | None]
"""From the positions of queries and keys to what is added to the logits, or None."""


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
      ValueError: the tokens are more than a cache without a window has room for.
    """
    written = write(cache, k, v, lengths)
    o = attend_to_written(
        q,
        k,
        v,
        cache,
        written,
        scale=scale,
        window=window,
        lengths=lengths,
        soft_cap=soft_cap,
        bias=bias,
    )
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
    if window is None and lengths is None and slots < T:
        raise ValueError(
            f"attend_to_cache: {T} tokens in one call do not fit a cache of {slots}"
        )
    positions = before.position[:, None] + jnp.arange(T)
    if T > 1 and window is not None:
        # A ring may lose, by this write, keys that the first new queries still see:
        # so they are read from the ring before it, and the new ones beside it.
        keys = jnp.concatenate(
            [read_layer(before.keys, before.layer), k.astype(before.keys.dtype)], 1
        )
        values = jnp.concatenate(
            [read_layer(before.values, before.layer), v.astype(before.values.dtype)], 1
        )
        old = slot_positions(slots, before.position)
        key_positions = jnp.concatenate([old, positions], axis=1)
    else:
        keys = read_layer(written.keys, before.layer)
        values = read_layer(written.values, before.layer)
        if decodes_on_gpu(q):
            # Left to itself XLA turns the caches of all layers to the layout that the
            # products like best, and back, at every token: four times their bytes.
            keys, values = (as_it_lies(x, rows=0, columns=(2,)) for x in (keys, values))
        # After the write slot s holds the token that the ring rule names; padding has
        # none.
        count = T if lengths is None else lengths
        key_positions = slot_positions(slots, before.position + count)
    mask = visible_by_position(positions, key_positions, window=window)
    if written.hidden is not None:
        if T > 1:
            raise ValueError(
                f"attend_to_cache: slots are hidden from one token at a time, got {T}"
            )
        mask = mask & ~written.hidden[:, None, None, :]
    return attend(
        q,
        keys.astype(q.dtype),
        values.astype(q.dtype),
        scale=scale,
        causal=False,
        mask=mask,
        bias=None if bias is None else bias(positions, key_positions),
        soft_cap=soft_cap,
    )
