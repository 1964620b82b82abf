"""Shared code of layer stacks: stacked layers, scans over them, rows of their caches.

A stack of L layers with a pattern of P places has L // P repeats. Layers of one place
are alike but for their weights, so they are one module whose parameters have the
repeats on a leading axis: place p holds layers p, p + P, p + 2P, ... The L mod P layers
after the last repeat are modules of one layer each: see `stacked_layers`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int, PyTree

from pallas_kernels import target
from recurjax.layers.mesh import keep_rows_apart
from recurjax.types import Array, Cache, Tokens

Remat = Literal["nothing", "dots", "block"]


class PatternCache(NamedTuple):
    """The rows' positions, and one cache for each place in the pattern.

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


def stacked_layers(layers: int, pattern: int) -> list[range]:
    """Returns the layers of each module of a stack: P places, then what is left over.

    Args:
      layers: L.
      pattern: P, at most L.
    """
    repeated = layers - layers % pattern
    return [range(place, repeated, pattern) for place in range(pattern)] + [
        range(layer, layer + 1) for layer in range(repeated, layers)
    ]


def make_blocks(
    build: Callable[[int, Array, nnx.Rngs], nnx.Module],
    *,
    layers: int,
    pattern: int,
    rngs: nnx.Rngs,
) -> list[Any]:
    """Makes L blocks: a list of modules, each of which stacks its `stacked_layers`.

    Args:
      build: makes one block from its place in the pattern, its layer's number (traced)
        and its keys.
      layers: L.
      pattern: P.
    """
    groups = []
    for numbers in stacked_layers(layers, pattern):

        def block(
            key: Array, layer: Array, place: int = numbers.start % pattern
        ) -> nnx.Module:
            return build(place, layer, nnx.Rngs(params=key))

        # One traced init for all repeats, so that a deep stack takes no longer to
        # compile.
        keys = jax.random.split(rngs.params(), len(numbers))
        depths = jnp.arange(numbers.start, numbers.stop, numbers.step)
        groups.append(jax.vmap(block)(keys, depths))
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
    groups: list[Cache] = []
    for repeats, part in _runs(blocks):
        x, written, _ = scan_pattern(
            lambda _, block, x, group: (*block(x, group, tokens), None),
            x,
            cache.groups[part],
            tuple(blocks)[part],
            jnp.arange(repeats, dtype=jnp.int32),
            position=cache.position,
            remat=remat,
            unroll=unroll,
            cached=not cache.training,
        )
        groups += written
    return x, advanced(cache, tuple(groups), x.shape[1], tokens)


def layer_states(
    blocks: Sequence[Any], x: Float[Array, "B T D"], cache: PatternCache, tokens: Tokens
) -> Iterator[Float[Array, "B T D"]]:
    """Yields x, and then what each layer makes of it, one layer a call.

    A scan hands on no state between its layers; two models are compared by these.

    Args:
      cache: a cache of length 0.
    """

    @jax.jit
    def run(block, group, x):
        # Layers run one by one here, each with a cache of one entry.
        group = group._replace(position=cache.position, layer=jnp.int32(0))
        return block(x, group, tokens)[0]

    yield x
    for repeats, part in _runs(blocks):
        for repeat in range(repeats):
            for block, group in zip(
                tuple(blocks)[part], cache.groups[part], strict=True
            ):
                layer = jax.tree.map(lambda w, at=repeat: w[at], block)
                x = run(layer, group, x)
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
      position: position of every row, for the caches.
      cached: a prefill or a decode step, not training.
      reverse: the last layer first.

    Returns:
      x, the written groups, and for each place the stacked `out` of its layers.
    """
    order = range(len(groups))
    order = order[::-1] if reverse else order

    def repeat(carry, turn):
        x, groups = carry
        # A scan's carry keeps one sharding, and the compiler could choose a bad one.
        x = keep_rows_apart(x)
        parts, entry = turn
        written, outs = list(groups), [None] * len(groups)
        for number in order:
            group = groups[number]._replace(position=position, layer=entry)
            x, group, out = apply(number, parts[number], x, group)
            written[number], outs[number] = group, out
        return (x, tuple(written)), tuple(outs)

    # The scan hands back what it was given last; only arrays of the caches are news.
    started = tuple(g._replace(position=position, layer=entries[0]) for g in groups)
    (x, written), outs = scan_layers(
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
    return x, written, outs


def advanced(
    cache: PatternCache, groups: tuple[Cache, ...], length: int, tokens: Tokens
) -> PatternCache:
    """Returns the cache after a call of `length` tokens; the training cache stays."""
    if cache.training:
        return cache
    count = length if tokens.lengths is None else tokens.lengths
    return PatternCache(position=cache.position + count, groups=groups)


def _runs(blocks: Sequence[Any]) -> Iterator[tuple[int, slice]]:
    """Yields each number of repeats and the modules that have it."""
    counts = [jax.tree.leaves(block)[0].shape[0] for block in blocks]
    start = 0
    for repeats, same in itertools.groupby(counts):
        stop = start + len(list(same))
        yield repeats, slice(start, stop)
        start = stop


def scan_layers(
    body: Callable,
    carry: Any,
    layers: Any,
    *,
    remat: Remat,
    unroll: int,
    cached: bool,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Computes `lax.scan(body, carry, layers)`.

    XLA's CPU backend has no bfloat16 of its own: to take a layer from a bfloat16 stack,
    it first widens the full stack to float32, in every call. So calls without gradients
    scan such stacks as integers with the same bits.

    Args:
      layers: the scan's xs; the leading axis of each leaf counts the layers.
      remat, unroll: see `rematerialize` and `lax.scan`.
      cached: a prefill or a decode step, not training.
      reverse: the last layer first.
    """
    body = rematerialize(body, remat)
    scan = partial(jax.lax.scan, unroll=unroll, reverse=reverse)
    narrow = jax.tree.map(lambda leaf: leaf.dtype == jnp.bfloat16, layers)
    # Training differentiates, and integers have no gradient: bits are for calls with a
    # cache.
    if not (cached and target.widens_bfloat16() and any(jax.tree.leaves(narrow))):
        return scan(body, carry, layers)

    def on_bits(carry, bits):
        return body(carry, jax.tree.map(_from_bits, bits, narrow))

    bits = jax.tree.map(_to_bits, layers, narrow)
    return scan(on_bits, carry, bits)


_FEW = 2
"""Iterations whose weights fit on a TPU's chip together. With three, XLA did not take
all of them, as compiled for a v5e, at any width."""


def layers_a_turn(
    x: Float[Array, "B T D"], unroll: int, turns: int, *, cached: bool
) -> int:
    """Returns how many of a scan's turns are unrolled: all in a GPU's decode step.

    XLA for TPUs reads each layer's weights in place in a loop too, but of two layers it
    takes both to the chip at each.

    Args:
      unroll: as the config has it.
      turns: number of iterations of the scan.
      cached: a prefill or a decode step, not training.
    """
    if cached and x.shape[1] == 1 and target.prefers_unrolled_decode():
        return turns
    return loops_a_turn(x, min(unroll, turns), turns, cached=cached)


def loops_a_turn(
    x: Float[Array, "B T D"], unroll: int, turns: int, *, cached: bool
) -> int:
    """Returns the same of loops over one stack: all if few in a TPU's decode step."""
    decodes = cached and x.shape[1] == 1
    few = turns <= _FEW and target.prefetches_to_vmem()
    return turns if decodes and few else unroll


def _to_bits(x: Array, narrow: bool) -> Array:
    return _bits(x) if narrow else x


def _from_bits(x: Array, narrow: bool) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if narrow else x


@jax.custom_jvp
def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


@_bits.defjvp
def _bits_jvp(*_):
    # Integers have no gradient: without this rule it would be zero, silently.
    raise NotImplementedError(
        "scan_layers: a call with a cache has no gradient with bfloat16 "
        "weights on CPU: keep the parameters in float32"
    )


def rematerialize(body: Callable, remat: Remat, *, scanned: bool = True) -> Callable:
    """Wraps a layer so that its backward pass computes part of it again.

    Args:
      body: the function of (carry, x) given to `lax.scan`.
      remat: "nothing" keeps all residuals; "dots" keeps the outputs of matrix products
        without batch dimensions (those with weights) and computes the rest again;
        "block" keeps the body's input only.
      scanned: whether a scan runs the body. Nothing can be merged across a scan's
        turns; outside one, the compiler would merge forward and recomputed values and
        keep them, so a barrier separates them.
    """
    if remat == "nothing":
        return body
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    policy = dots if remat == "dots" else None
    # No policy keeps nothing but the body's input.
    return jax.checkpoint(body, policy=policy, prevent_cse=not scanned)


class CacheRows:
    """Gives a stack with `init_cache` the methods on a cache's rows.

    An engine keeps a row for each request: when one ends, its row is emptied and
    another request's prefilled row takes its place, while the neighbours decode on.
    Which axis of an array counts the rows differs (keys have the layers in front,
    positions do not); it is the one axis that grows with the batch.
    """

    def init_cache(self, batch: int, length: int, dtype) -> Cache:
        """Creates an empty cache: the stack's own method."""
        raise NotImplementedError

    def reset(self, cache: Cache, rows: Bool[Array, " B"]) -> Cache:
        """Makes the chosen rows as `init_cache` made them: at position 0, all zeros.

        Keys that nobody sees any more are cleared too: a masked weight of zero times
        what a diverged row left behind would still be not a number.
        """

        def clear(leaf: Array, axis: int) -> Array:
            if axis < 0:
                return leaf
            shape = [1] * leaf.ndim
            shape[axis] = -1
            return jnp.where(rows.reshape(shape), jnp.zeros((), leaf.dtype), leaf)

        return jax.tree.map(clear, cache, self.row_axes(cache))

    def insert(self, cache: Cache, row: Int[Array, ""] | int, other: Cache) -> Cache:
        """Puts the one row of `other` into place `row`; the rest stays to the bit.

        Args:
          other: a cache of batch 1, made for the same length and dtype.

        Raises:
          ValueError: the caches do not fit.
        """

        def put(leaf: Array, new: Array, axis: int) -> Array:
            if axis < 0:
                return leaf
            expected = (*leaf.shape[:axis], 1, *leaf.shape[axis + 1 :])
            if new.shape != expected or new.dtype != leaf.dtype:
                raise ValueError(
                    "insert: new must be a cache of one row and the same length, with "
                    f"{expected} of {leaf.dtype}, got {new.shape} of {new.dtype}"
                )
            return jax.lax.dynamic_update_slice_in_dim(leaf, new, row, axis)

        return jax.tree.map(put, cache, other, self.row_axes(cache))

    def take(self, cache: Cache, rows: Int[Array, " N"]) -> Cache:
        """Returns a cache of the chosen rows, in this order; a row may repeat.

        So a prompt is read once for several continuations of it.
        """

        def pick(leaf: Array, axis: int) -> Array:
            return leaf if axis < 0 else jnp.take(leaf, rows, axis=axis)

        return jax.tree.map(pick, cache, self.row_axes(cache))

    def row_axes(self, cache: Cache) -> PyTree[int]:
        """Returns the axis of each array that counts rows; -1 where none does."""
        # Caches of one row and of two differ in this axis; only shapes are computed.
        single, double = (
            jax.eval_shape(lambda batch=batch: self.init_cache(batch, 1, jnp.float32))
            for batch in (1, 2)
        )
        axes = jax.tree.map(_grown_axis, single, double)
        assert jax.tree.structure(axes) == jax.tree.structure(cache)
        return axes


def _grown_axis(single: jax.ShapeDtypeStruct, double: jax.ShapeDtypeStruct) -> int:
    sizes = zip(single.shape, double.shape, strict=True)
    # What has no axis of rows, such as a counter of all of them, is left as it is.
    return next((axis for axis, (a, b) in enumerate(sizes) if a != b), -1)


_Config = TypeVar("_Config", bound="StackFacts")


def residual_scale(kind: Literal["one", "inverse_sqrt_depth"], layers: int) -> float:
    """Returns what multiplies both branches of a layer: 1, or 1/sqrt(L).

    1/sqrt(L) keeps the sum of 2 L branches from growing with depth.
    """
    return 1.0 if kind == "one" else layers**-0.5


class StackFacts:
    """The facts that every stack's config states; a config overrides what differs.

    `ModelConfig` passes them on. They are properties, not fields, so that no run's
    config.json changes when a fact is added.
    """

    __slots__ = ()

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None: no limit."""
        return None

    @property
    def training_length(self) -> int | None:
        """The length of training that the stack's windows come from; None: any."""
        return None

    @property
    def takes_segments(self) -> bool:
        """Whether, called on entire rows, the stack tells their documents apart."""
        return True

    @property
    def reset_token(self) -> int | None:
        """Id of the token that begins a document for the stack; None: none does."""
        return None

    @property
    def table_rows(self) -> int | None:
        """Rows of the stack's own tables by token id; None: it has no such table.

        They must equal the rows of the model's embedding.
        """
        return None

    def with_table_rows(self: _Config, rows: int) -> _Config:
        """Returns the config with `rows` rows in each of the stack's own tables."""
        del rows
        return self
