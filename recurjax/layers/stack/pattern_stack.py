"""Layers in a repeating pattern: made once, stacked, and run by a scan over repeats.

A stack of L layers with a pattern of P places has L / P repeats. Layers of one place
are alike but for their weights, so they are one module whose parameters have the
repeats on a leading axis: place p holds layers p, p + P, p + 2P, ...
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from recurjax.layers.mesh import keep_rows_apart
from recurjax.layers.stack.layer_scan import Remat, layers_a_turn, scan_layers
from recurjax.types import Array, Cache, Tokens


class PatternCache(NamedTuple):
    """Where the rows stand, and one cache for each place in the pattern.

    Attributes:
      position: how many tokens each row has seen.
      groups: each stacks its place's layers, and has `slots` (0 in training), and
        `position` and `layer`, which the run sets for each layer.
    """

    position: Int[Array, " B"]
    groups: tuple[Cache, ...]

    @property
    def training(self) -> bool:
        """Whether nothing is kept."""
        return all(group.slots == 0 for group in self.groups)


def make_blocks(
    build: Callable[[int, Array, nnx.Rngs], nnx.Module],
    *,
    layers: int,
    pattern: int,
    rngs: nnx.Rngs,
) -> list[Any]:
    """Makes L blocks: a list of P modules, each stacking the layers of its place.

    Args:
      build: makes one block from its place, its layer's number (traced) and its keys.
      layers: L, a multiple of P.
      pattern: P.
    """
    # Place p of the pattern serves the layers p, p + P, p + 2 P, ...: `repeats` of
    # them.
    repeats = layers // pattern
    groups = []
    for place in range(pattern):

        def block(key: Array, layer: Array, place: int = place) -> nnx.Module:
            return build(place, layer, nnx.Rngs(params=key))

        # One traced init for all repeats, so that a deep stack takes no longer to
        # compile.
        keys = jax.random.split(rngs.params(), repeats)
        groups.append(jax.vmap(block)(keys, place + pattern * jnp.arange(repeats)))
    return groups


def run_blocks(
    blocks: Sequence[Any],
    x: Float[Array, "B T D"],
    cache: PatternCache,
    tokens: Tokens,
    *,
    remat: Remat,
    unroll: int,
) -> tuple[Float[Array, "B T D"], PatternCache]:
    """Runs T more positions of every row through blocks of the form (x, cache) -> same.

    Args:
      blocks: from `make_blocks`; each is called as `block(x, group, tokens)`.
      remat: what the backward pass computes again.
      unroll: repeats of the pattern in one turn of the scan.
    """
    repeats = _repeats(blocks)
    x, groups, _ = scan_pattern(
        lambda _, block, x, group: (*block(x, group, tokens), None),
        x,
        cache.groups,
        tuple(blocks),
        jnp.arange(repeats, dtype=jnp.int32),
        position=cache.position,
        remat=remat,
        unroll=unroll,
        cached=not cache.training,
    )
    return x, advanced(cache, groups, x.shape[1], tokens)


def layer_states(
    blocks: Sequence[Any], x: Float[Array, "B T D"], cache: PatternCache, tokens: Tokens
) -> Iterator[Float[Array, "B T D"]]:
    """Yields x, and then what each layer makes of it, one layer a call.

    A scan hands on no state between its layers; two models are compared by these.

    Args:
      cache: of length 0.
    """

    @jax.jit
    def run(block, group, x):
        # Layers run one by one here, each with a cache of one entry.
        group = group._replace(position=cache.position, layer=jnp.int32(0))
        return block(x, group, tokens)[0]

    yield x
    for repeat in range(_repeats(blocks)):
        for block, group in zip(blocks, cache.groups, strict=True):
            own = jax.tree.map(lambda w, at=repeat: w[at], block)
            x = run(own, group, x)
            yield x


def scan_pattern(
    apply: Callable[[int, Any, Array, Any], tuple[Array, Any, Any]],
    x: Float[Array, "B T D"],
    groups: tuple[Cache, ...],
    places: tuple[Any, ...],
    entries: Int[Array, " N"],
    *,
    position: Int[Array, " B"],
    remat: Remat,
    unroll: int,
    cached: bool,
    reverse: bool = False,
) -> tuple[Float[Array, "B T D"], tuple[Cache, ...], tuple[Any, ...]]:
    """Runs x through N repeats of the pattern, each with its own entry of the caches.

    This is the piece that stacks of other shapes are made of too: one that loops over
    its layers calls it inside a scan of its own, with weights closed over, the loop's
    additions in `places` and the loop's entries.

    Args:
      apply: `apply(number, place, x, group) -> (x, group, out)` for one layer; `number`
        counts the places from 0.
      groups: one cache a place, carried from layer to layer.
      places: what each place's layers are made of, the repeats on the leading axis.
      entries: which entry of its group's cache each repeat uses.
      position: of every row, which the caches are told.
      cached: a prefill or a decode step, not training.
      reverse: the last layer first.

    Returns:
      x, the written groups, and for each place the stacked `out` of its layers.
    """
    order = range(len(groups))
    order = order[::-1] if reverse else order

    def repeat(carry, turn):
        x, groups = carry
        # Pinned once a turn: a scan's carry keeps one sharding, and the compiler could
        # choose a bad one for it.
        x = keep_rows_apart(x)
        parts, entry = turn
        written, made = list(groups), [None] * len(groups)
        for number in order:
            group = groups[number]._replace(position=position, layer=entry)
            x, group, out = apply(number, parts[number], x, group)
            written[number], made[number] = group, out
        return (x, tuple(written)), tuple(made)

    # The scan hands back what it was given last; only arrays of the caches are news.
    started = tuple(g._replace(position=position, layer=entries[0]) for g in groups)
    (x, written), made = scan_layers(
        repeat,
        (x, started),
        (places, entries),
        remat=remat,
        unroll=layers_a_turn(x, unroll, entries.shape[0], cached=cached),
        cached=cached,
        reverse=reverse,
    )
    written = tuple(
        new._replace(position=old.position, layer=old.layer)
        for new, old in zip(written, groups, strict=True)
    )
    return x, written, made


def advanced(
    cache: PatternCache, groups: tuple[Cache, ...], length: int, tokens: Tokens
) -> PatternCache:
    """Returns the cache after a call of `length` tokens; the training cache stays."""
    if cache.training:
        return cache
    count = length if tokens.lengths is None else tokens.lengths
    return PatternCache(position=cache.position + count, groups=groups)


def _repeats(blocks: Sequence[Any]) -> int:
    return jax.tree.leaves(blocks[0])[0].shape[0]
