"""The three ways in which a layer of the block is run, as `scan_pattern` wants them.

Each takes the place's number, a part (block, adapters, kept keys and values or None), x
and the place's cache, and returns x, the cache, and what is stacked over the layers.
"""

from collections.abc import Callable

from recurjax.layers.pattern_stack import PatternCache
from recurjax.types import Tokens
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
        before = cache.groups[place]._replace(
            position=group.position, layer=group.layer
        )
        added = _additions(adapters)
        return block.read(x, kept, before, group, tokens, added), group, None

    return read


def _additions(adapters: BlockAdapters | None) -> BlockAdditions | None:
    return None if adapters is None else adapters.additions()
