"""What all uses of a shared layer have in common, and what each has of its own.

The block is one module, as every stack's. Its matrices serve all loops; its norms and
biases too, or they are untied: then those leaves have the loops as a leading axis and a
loop puts the block together from the shared matrices and its own vectors.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recurjax.types import Array
from recurjax.variants.relaxed_recursive_transformer.adapters import BlockAdapters
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer.block import TransformerBlock


class Uses(NamedTuple):
    """What the uses of one place's layers own.

    Attributes:
      vectors: norms and biases, where they are untied: those of the block's leaves that
        are no matrices, in the block's order.
      adapters: None at rank 0.
    """

    vectors: tuple[Array, ...]
    adapters: BlockAdapters | None


def shared_leaves(
    blocks: Sequence[TransformerBlock], config: RelaxedRecursiveTransformerConfig
) -> tuple[tuple[Array, ...], ...]:
    """Returns of each place the leaves that all uses share, [K / P, ...]."""
    # What a scan over repeats takes apart has the repeats on the leading axis.
    return tuple(
        tuple(leaf for leaf, own in _leaves(block, config) if not own)
        for block in blocks
    )


def own_leaves(
    blocks: Sequence[TransformerBlock],
    adapters: Sequence[BlockAdapters] | None,
    config: RelaxedRecursiveTransformerConfig,
) -> tuple[Uses, ...]:
    """Returns of each place what its uses own, [loops, K / P, ...]."""
    # One more axis in front, the loops, for the scan around it.
    return tuple(
        Uses(
            vectors=tuple(leaf for leaf, own in _leaves(block, config) if own),
            adapters=None if adapters is None else adapters[place],
        )
        for place, block in enumerate(blocks)
    )


class ByLoop(NamedTuple):
    """What tells the loops of one place's layers apart, laid out for rows of any loop.

    Attributes:
      vectors: as of `Uses`, the loops behind the layers: [K / P, loops, ...].
      adapters: of all loops side by side, A [K / P, N, loops R], B [K / P, loops R, M].
    """

    vectors: tuple[Array, ...]
    adapters: BlockAdapters | None


def by_loop(
    blocks: Sequence[TransformerBlock],
    adapters: Sequence[BlockAdapters] | None,
    config: RelaxedRecursiveTransformerConfig,
) -> tuple[ByLoop, ...]:
    """Lays out of each place what its uses own; a copy, so it is made once."""
    # A norm by head is multiplied with [B, T, H, E], the other vectors with [B, T, D].
    by_head = config.transformer.attention.qk_norm_over == "head"

    def beside(path: tuple[Any, ...], leaf: Array) -> Array:
        leaf = jnp.swapaxes(leaf, 0, 1)
        name = jax.tree_util.keystr(path)
        per_head = by_head and re.search(r"\b[qk]_norm\b", name) is not None
        return leaf[:, :, None] if per_head else leaf

    def side_by_side(path: tuple[Any, ...], leaf: Array) -> Array:
        loops, layers, inner, outer = leaf.shape
        if "w_reduce" in jax.tree_util.keystr(path):
            return leaf.transpose(1, 2, 0, 3).reshape(layers, inner, loops * outer)
        return leaf.swapaxes(0, 1).reshape(layers, loops * inner, outer)

    made = []
    for place, block in enumerate(blocks):
        leaves = jax.tree_util.tree_leaves_with_path(block)
        owned = [own for _, own in _leaves(block, config)]
        vectors = [
            beside(*leaf) for leaf, own in zip(leaves, owned, strict=True) if own
        ]
        joint = None
        if adapters is not None:
            joint = jax.tree_util.tree_map_with_path(side_by_side, adapters[place])
        made.append(ByLoop(vectors=tuple(vectors), adapters=joint))
    return tuple(made)


def joined(
    block: TransformerBlock,
    config: RelaxedRecursiveTransformerConfig,
    shared: tuple[Array, ...],
    vectors: tuple[Array, ...],
) -> TransformerBlock:
    """Puts a block together again, from parts of what the two functions returned.

    Args:
      block: gives the structure.
    """
    # Leaves in the block's own order, each taken from the side that owns it.
    ours, theirs = iter(shared), iter(vectors)
    leaves = [next(theirs if own else ours) for _, own in _leaves(block, config)]
    return jax.tree.unflatten(jax.tree.structure(block), leaves)


def with_vectors_by_loop(block: TransformerBlock, loops: int) -> TransformerBlock:
    """Repeats norms and biases, which start alike: [K / P, D] to [loops, K / P, D]."""

    def repeated(path: tuple[Any, ...], leaf: Array) -> Array:
        return leaf if _is_matrix(path) else jnp.stack([leaf] * loops)

    return jax.tree_util.tree_map_with_path(repeated, block)


def _leaves(
    block: TransformerBlock, config: RelaxedRecursiveTransformerConfig
) -> list[tuple[Array, bool]]:
    """Returns a block's leaves, and whether each use has its own."""
    leaves = jax.tree_util.tree_leaves_with_path(block)
    # Only norms and biases are ever untied; matrices serve all loops.
    untied = not config.tie_norms
    return [(leaf, untied and not _is_matrix(path)) for path, leaf in leaves]


def _is_matrix(path: tuple[Any, ...]) -> bool:
    return re.search(r"\bw_\w+", jax.tree_util.keystr(path)) is not None
