"""The shared block: which depth runs which layer, what a depth adds, how it is run."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from recurjax.layers.attention import AttentionAdditions
from recurjax.layers.initialization import InitConfig, draw_weight
from recurjax.layers.linear import LowRank
from recurjax.layers.mlp import MlpAdditions
from recurjax.layers.stack import PatternCache
from recurjax.types import Array, Tokens
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
    Sharing,
    linear_maps,
)
from recurjax.variants.transformer.block import BlockAdditions, TransformerBlock


def shared_layers(layers: int, loops: int, sharing: Sharing) -> Int[np.ndarray, " L"]:
    """Returns the block's layer at each depth l, with K = L / loops.

    cycle: l mod K; sequence: l // loops; cycle_rev: as cycle, the last loop backwards
    (with a single loop there is nothing to share, and nothing is turned).
    """
    block = layers // loops
    # The layers as they are run, from 0.
    depths = np.arange(layers)
    if sharing == "sequence":
        return depths // loops
    order = depths % block
    if sharing == "cycle_rev" and loops > 1:
        # The last loop from its last layer to its first.
        order[-block:] = order[-block:][::-1]
    return order


def depths_of(layers: int, loops: int, sharing: Sharing) -> Int[np.ndarray, "R K"]:
    """Returns the depth at which layer k of the block is run for the r-th time.

    This is how everything that belongs to a depth (additions, own norms, entries of the
    cache) finds its layer: by use first, then by layer, [loops, K].
    """
    order = shared_layers(layers, loops, sharing)
    # Each layer of the block is met `loops` times, whatever the sharing.
    uses = [np.flatnonzero(order == layer) for layer in range(layers // loops)]
    return np.stack(uses, axis=1)


class Adapter(nnx.Module):
    """x W becomes x W + (x A) B; starts as nothing: A is drawn, B is zero."""

    def __init__(
        self, sizes: tuple[int, int], rank: int, init: InitConfig, *, rngs: nnx.Rngs
    ):
        inputs, outputs = sizes
        # No matrix has a higher rank than its smaller side.
        rank = min(rank, inputs, outputs)
        w_reduce = draw_weight(
            rngs.params(), (inputs, rank), fan_in=inputs, config=init
        )
        self.w_reduce = nnx.Param(w_reduce)
        # B at zero: every depth starts as the shared block itself.
        self.w_expand = nnx.Param(jnp.zeros((rank, outputs), jnp.float32))

    def low_rank(self) -> LowRank:
        """Returns A and B as the layers take them."""
        return LowRank(self.w_reduce[...], self.w_expand[...])


class BlockAdapters(nnx.Module):
    """One depth's adapters: one for each linear map of a Transformer layer."""

    def __init__(self, config: RelaxedRecursiveTransformerConfig, *, rngs: nnx.Rngs):
        # Every linear map of the layer, by the name that its adapter has.
        maps = linear_maps(config.transformer)

        def adapter(name: str) -> Adapter:
            return Adapter(maps[name], config.rank, config.init, rngs=rngs)

        self.q = adapter("q")
        self.k = adapter("k")
        self.v = adapter("v")
        self.out = adapter("out")
        self.up = adapter("up")
        # A plain MLP has no gate, and so no adapter for one.
        self.gate = adapter("gate") if "gate" in maps else None
        self.down = adapter("down")

    def additions(self) -> BlockAdditions:
        """Returns them as a block takes them."""
        gate = None if self.gate is None else self.gate.low_rank()
        return BlockAdditions(
            attention=AttentionAdditions(
                q=self.q.low_rank(),
                k=self.k.low_rank(),
                v=self.v.low_rank(),
                out=self.out.low_rank(),
            ),
            mlp=MlpAdditions(
                up=self.up.low_rank(), gate=gate, down=self.down.low_rank()
            ),
        )


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
