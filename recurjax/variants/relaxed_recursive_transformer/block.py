"""The shared block: which depth runs which layer, what a depth adds, how it is run.

The block is one module, as every stack's. Its matrices serve all loops; its norms and
biases too, or they are untied: then those leaves have the loops as a leading axis, and
a loop joins the shared matrices with its own vectors.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from recurjax.layers.initialization import InitConfig, draw_weight
from recurjax.layers.linear import AdaptedWeight, is_composed
from recurjax.layers.stack import PatternCache
from recurjax.types import Array, Tokens
from recurjax.variants.rat import RatConfig
from recurjax.variants.rat import stack as rat
from recurjax.variants.rat.recurrent_layer import RecurrentBlock
from recurjax.variants.rat.stack import RatBlock
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
    Sharing,
)
from recurjax.variants.transformer import TransformerConfig
from recurjax.variants.transformer.block import TransformerBlock


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


LoopedBlock = TransformerBlock | RatBlock | RecurrentBlock
"""What can be looped: a layer that runs on a cache, and that tokens may leave out."""


def make_block(
    base: TransformerConfig | RatConfig, place: int, layer: Array, *, rngs: nnx.Rngs
) -> LoopedBlock:
    """Makes a layer of a place of the pattern."""
    match base:
        case TransformerConfig():
            kind = base.pattern[place]
            return TransformerBlock(base, kind=kind, layer=layer, rngs=rngs)
        case RatConfig():
            return rat.make_block(base, place, layer, rngs)


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


BlockAdapters = nnx.Dict[Adapter]
"""One depth's adapters: one for each linear map of a layer, by the map's name."""


def make_adapters(
    config: RelaxedRecursiveTransformerConfig, place: int, *, rngs: nnx.Rngs
) -> BlockAdapters:
    """Makes one depth's adapters of a place of the pattern."""
    maps = config.transformer.block_maps(place)
    return nnx.Dict(
        {
            name: Adapter(sizes, config.rank, config.init, rngs=rngs)
            for name, sizes in maps.items()
        }
    )


def map_name(weight: str) -> str:
    """Returns the name of a linear map by its weight's, such as `attention.w_q`.

    A gate's map has the gate's name, `mixer.forget_gate.w_full`, and those of a gate of
    low rank also their own.
    """
    module, _, word = weight.rpartition(".w_")
    if not module.endswith("_gate"):
        return word
    gate = module.rpartition(".")[2]
    return gate if word == "full" else f"{gate}_{word}"


class LoopWeights(NamedTuple):
    """The weights of each loop for one place's layers.

    Attributes:
      vectors: norms and biases, where they are untied: those of the block's leaves that
        are not matrices, in the block's order.
      adapters: None at rank 0.
    """

    vectors: tuple[Array, ...]
    adapters: BlockAdapters | None


def shared_weights(
    blocks: Sequence[LoopedBlock], config: RelaxedRecursiveTransformerConfig
) -> tuple[tuple[Array, ...], ...]:
    """Returns each place's leaves that all loops share, [K / P, ...]."""
    # What a scan over repeats takes apart has the repeats on the leading axis.
    return tuple(
        tuple(leaf for leaf, per_loop in _leaves(block, config) if not per_loop)
        for block in blocks
    )


def loop_weights(
    blocks: Sequence[LoopedBlock],
    adapters: Sequence[BlockAdapters] | None,
    config: RelaxedRecursiveTransformerConfig,
) -> tuple[LoopWeights, ...]:
    """Returns each place's `LoopWeights`, [loops, K / P, ...]."""
    # One more axis in front, the loops, for the scan around it.
    return tuple(
        LoopWeights(
            vectors=tuple(
                leaf for leaf, per_loop in _leaves(block, config) if per_loop
            ),
            adapters=None if adapters is None else adapters[place],
        )
        for place, block in enumerate(blocks)
    )


def weights_by_layer(
    blocks: Sequence[LoopedBlock],
    adapters: Sequence[BlockAdapters] | None,
    config: RelaxedRecursiveTransformerConfig,
) -> tuple[LoopWeights, ...]:
    """Returns each place's `LoopWeights` laid out for rows at any loop, as a copy.

    The vectors are [K / P, loops, ...]; the adapters of all loops are side by side, A
    [K / P, N, loops R] and B [K / P, loops R, M].
    """

    def layer_first(leaf: Array) -> Array:
        return jnp.swapaxes(leaf, 0, 1)

    def side_by_side(path: tuple[Any, ...], leaf: Array) -> Array:
        loops, layers, inner, outer = leaf.shape
        if "w_reduce" in jax.tree_util.keystr(path):
            return leaf.transpose(1, 2, 0, 3).reshape(layers, inner, loops * outer)
        return leaf.swapaxes(0, 1).reshape(layers, loops * inner, outer)

    places = []
    for place, block in enumerate(blocks):
        vectors = [
            layer_first(leaf) for leaf, per_loop in _leaves(block, config) if per_loop
        ]
        joint = None
        if adapters is not None:
            joint = jax.tree_util.tree_map_with_path(side_by_side, adapters[place])
        places.append(LoopWeights(vectors=tuple(vectors), adapters=joint))
    return tuple(places)


def join(
    block: LoopedBlock,
    config: RelaxedRecursiveTransformerConfig,
    shared: tuple[Array, ...],
    own: LoopWeights,
    active: Callable[[Array], Array] | None = None,
) -> LoopedBlock:
    """Joins a block from shared weights and one loop's own.

    Args:
      block: gives the structure.
      active: returns which columns count of an A that joins those of all loops; None:
        all.
    """
    # Leaves in the block's own order, each taken from the side that owns it.
    shared_leaves, own_leaves = iter(shared), iter(own.vectors)
    leaves = [
        next(own_leaves if per_loop else shared_leaves)
        for _, per_loop in _leaves(block, config)
    ]
    joined = jax.tree.unflatten(jax.tree.structure(block), leaves)
    adapters = own.adapters
    if adapters is None:
        return joined

    def adapt(path: tuple[Any, ...], weight: Any) -> Any:
        name = map_name(_name(path))
        if name not in adapters:
            return weight
        a, b = adapters[name].w_reduce[...], adapters[name].w_expand[...]
        columns = None if active is None else active(a)
        return AdaptedWeight(base=weight, lora_a=a, lora_b=b, active=columns)

    return jax.tree_util.tree_map_with_path(adapt, joined, is_leaf=is_composed)


def repeat_vectors(block: LoopedBlock, loops: int) -> LoopedBlock:
    """Repeats norms and biases, which start alike: [K / P, D] to [loops, K / P, D]."""

    def repeated(path: tuple[Any, ...], leaf: Array) -> Array:
        return leaf if _is_matrix(path) else jnp.stack([leaf] * loops)

    return jax.tree_util.tree_map_with_path(repeated, block)


def _leaves(
    block: LoopedBlock, config: RelaxedRecursiveTransformerConfig
) -> list[tuple[Array, bool]]:
    """Returns a block's leaves, and whether each use has its own."""
    leaves = jax.tree_util.tree_leaves_with_path(block)
    # Only norms and biases are ever untied; matrices serve all loops.
    untied = not config.tie_norms
    return [(leaf, untied and not _is_matrix(path)) for path, leaf in leaves]


def _is_matrix(path: tuple[Any, ...]) -> bool:
    return re.search(r"\bw_\w+", _name(path)) is not None


def _name(path: tuple[Any, ...]) -> str:
    """Returns a leaf's name in its block; a Param's own `value` step is left out."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


# How `scan_pattern` runs a layer of the block. Each function below returns one that
# takes the place's number, a part (block, loop 1's keys and values or None), x and the
# place's cache, and returns x, the cache, and what is stacked over layers.


def run_layer(tokens: Tokens) -> Callable:
    """Runs a layer on keys and values, or states, of its own."""

    def run(_, part, x, group):
        block, _ = part
        return *block(x, group, tokens), None

    return run


def run_layer_keep_kv(tokens: Tokens) -> Callable:
    """Runs a layer and returns its new keys and values, for deeper loops to read."""

    def keep(_, part, x, group):
        block, _ = part
        return block.keep(x, group, tokens)

    return keep


def run_layer_read_kv(tokens: Tokens, cache: PatternCache) -> Callable:
    """Runs a layer on the keys and values that loop 1 made and wrote.

    Args:
      cache: as it was before loop 1. A ring is read as it was before the write, which
        may have overwritten keys that the first of several new queries still see.
    """

    def read(place, part, x, group):
        block, kv = part
        # The cache before loop 1, at this layer's entry and the rows' positions.
        before = cache.groups[place]._replace(
            position=group.position, layer=group.layer
        )
        return block.read(x, kv, before, group, tokens), group, None

    return read


def write_kv(tokens: Tokens) -> Callable:
    """Writes what a layer keeps of tokens that have left; x stays as it is."""

    def write(_, part, x, group):
        block, _ = part
        return x, block.write(x, group, tokens), None

    return write


def hold_exited(act: Callable, exited: Bool[Array, "B T"]) -> Callable:
    """Runs a layer as `act` does, and leaves the states of tokens that have left.

    Their keys and values still come from those states.
    """

    def hold(place, part, x, group):
        y, group, new = act(place, part, x, group)
        return jnp.where(exited[..., None], x, y), group, new

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
      parts: parts for each use and each place of the pattern, with the repeats on the
        leading axis.
      order: the block's layer at each depth.
      cache: a cache of length 0.
      on_first: deeper loops read the keys and values of the first.
    """
    # A layer's first run makes the keys and values, its later ones may read them.
    first = run_layer_keep_kv(tokens) if on_first else run_layer(tokens)
    later = run_layer_read_kv(tokens, cache) if on_first else first
    # How often each layer of the block has run, and its first run's keys and values.
    used: dict[int, int] = {}
    first_kv: dict[int, Any] = {}
    yield x
    for layer in order.tolist():
        repeat, place = divmod(layer, len(cache.groups))
        use = used.setdefault(layer, 0)
        block, _ = jax.tree.map(lambda leaf, at=repeat: leaf[at], parts[use][place])
        # A cache of one layer: nothing is kept between calls here.
        group = cache.groups[place]._replace(
            position=cache.position, layer=jnp.int32(0)
        )
        # Compiled by itself: the comparison must not share the scans' program.
        act = jax.jit(later if use else first, static_argnums=0)
        part = (block, first_kv.get(layer))
        x, _, new = act(place, part, x, group)
        if not use:
            first_kv[layer] = new
        used[layer] += 1
        yield x
