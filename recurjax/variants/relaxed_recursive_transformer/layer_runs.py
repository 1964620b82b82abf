"""The ways in which a layer of the block is run, as `scan_pattern` wants them.

Each takes the place's number, a part (block, adapters, kept keys and values or None), x
and the place's cache, and returns x, the cache, and what is stacked over the layers.
`one_by_one` runs them without a scan.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from recurjax.layers.stack import PatternCache
from recurjax.types import Array, Tokens
from recurjax.variants.relaxed_recursive_transformer.adapters import BlockAdapters
from recurjax.variants.transformer.block import BlockAdditions


def runs(tokens: Tokens) -> Callable:
    """Runs a layer on keys and values of its own."""

    def run(_, part, x, group):
        block, adapters, _ = part
        return *block(x, group, tokens, _additions(adapters)), None

    return run


def keeps(tokens: Tokens) -> Callable:
    """Runs a layer and hands its new keys and values on: loop 1, where others read."""

    def keep(_, part, x, group):
        block, adapters, _ = part
        return block.keep(x, group, tokens, _additions(adapters))

    return keep


def reads(tokens: Tokens, cache: PatternCache) -> Callable:
    """Runs a layer on the keys and values that loop 1 made and wrote.

    Args:
      cache: as it was before loop 1. A ring is read as it was before the write, which
        may have overwritten keys that the first of several new queries still see.
    """

    def read(place, part, x, group):
        block, adapters, kept = part
        # The cache as loop 1 found it, at this layer's entry and the rows' positions.
        before = cache.groups[place]._replace(
            position=group.position, layer=group.layer
        )
        added = _additions(adapters)
        return block.read(x, kept, before, group, tokens, added), group, None

    return read


def writes(tokens: Tokens) -> Callable:
    """Only writes keys and values, for tokens that have left: x stays as it is."""

    def write(_, part, x, group):
        block, adapters, _ = part
        return x, block.write(x, group, tokens, _additions(adapters)), None

    return write


def holding(act: Callable, left: Bool[Array, "B T"]) -> Callable:
    """Runs a layer as `act` does, and leaves the states of tokens that have left.

    Their keys and values are made of those states all the same.
    """

    def hold(place, part, x, group):
        y, group, made = act(place, part, x, group)
        return jnp.where(left[..., None], x, y), group, made

    return hold


def one_by_one(
    x: Float[Array, "B T D"],
    parts: Sequence[tuple[Any, ...]],
    order: Int[np.ndarray, " L"],
    cache: PatternCache,
    tokens: Tokens,
    *,
    on_first: bool,
) -> Iterator[Float[Array, "B T D"]]:
    """Yields x, and then what each depth makes of it, one layer a call.

    It follows the order of depths alone, so that it says what the nested scans over
    loops and layers should without sharing their way there.

    Args:
      parts: of each use and each place of the pattern, the repeats on the leading axis.
      order: the block's layer at each depth.
      cache: of length 0.
      on_first: deeper loops read the keys and values of the first.
    """
    # A layer's first run makes the keys and values, its later ones may read them.
    first = keeps(tokens) if on_first else runs(tokens)
    later = reads(tokens, cache) if on_first else first
    # How often each layer of the block has been run, and what its first run handed on.
    used: dict[int, int] = {}
    kept: dict[int, Any] = {}
    yield x
    for layer in order.tolist():
        repeat, place = divmod(layer, len(cache.groups))
        use = used.setdefault(layer, 0)
        block, adapters, _ = jax.tree.map(
            lambda leaf, at=repeat: leaf[at], parts[use][place]
        )
        # A cache of one layer: nothing is kept between calls here.
        group = cache.groups[place]._replace(
            position=cache.position, layer=jnp.int32(0)
        )
        # Compiled by itself: the comparison must not share the scans' program.
        act = jax.jit(later if use else first, static_argnums=0)
        part = (block, adapters, kept.get(layer))
        x, _, made = act(place, part, x, group)
        if not use:
            kept[layer] = made
        used[layer] += 1
        yield x


def _additions(adapters: BlockAdapters | None) -> BlockAdditions | None:
    return None if adapters is None else adapters.additions()
