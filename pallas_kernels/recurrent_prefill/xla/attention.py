"""Attention on the XLA path: which pairs a query sees, and how it reads them.

Causality, the cache's end, documents and ALiBi are additive biases by slot and
position. A query reads its keys a stretch at a time. It carries the largest logit so
far, the sum of exponentials relative to it, and the values weighted by them (online
softmax).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from pallas_kernels import reductions
from pallas_kernels.recurrent_prefill.call import Array, LayerSpec, RecurrentCache
from pallas_kernels.recurrent_prefill.equations import (
    HIDDEN,
    NormParameters,
    PreparedWeights,
    Rotary,
    linear,
    norm_and_rotate,
    pre_norm,
)
from pallas_kernels.recurrent_prefill.xla.geometry import Geometry


class Visibility(NamedTuple):
    """The masks of one loop's slots, by layer and row; None: no masks.

    Attributes:
      slopes: ALiBi's, [K, Q]: query heads of one key head side by side.
      origin: position of slot 0 in layer 0, [B or 1].
      first: slot of the first position, [L or 1, B or 1].
      segments: document of each slot, [L, B, slots].
    """

    slopes: Array | None
    origin: Array
    first: Array | None
    segments: Array | None


def alibi_slopes(spec: LayerSpec, dtype) -> Float[Array, "K Q"] | None:
    """Returns slope_h = 2^(-m (h + 1) / H) as [K, Q], or None without ALiBi."""
    if spec.alibi_max_bias is None:
        return None
    h = jnp.arange(1, spec.heads + 1, dtype=dtype)
    slopes = 2.0 ** (-spec.alibi_max_bias * h / spec.heads)
    return slopes.reshape(spec.key_heads, -1)


def positions_of(
    visibility: Visibility, slots: Int[Array, " T"], geometry: Geometry
) -> Int[Array, "L T #B"]:
    """Returns the positions [L, T, B or 1] of slots [T]."""
    late = geometry.lags() * geometry.tile
    return (slots - late[:, None])[..., None] + visibility.origin


def bias_of_slots(
    visibility: Visibility,
    query_slots: Int[Array, " T"],
    key_slots: Int[Array, " S"],
    seen: Bool[Array, "T S"],
    dtype,
) -> Float[Array, "#L #B #K #Q T S"]:
    """Returns biases [L or 1, B or 1, K or 1, Q or 1, T, S] for keys in slots.

    Args:
      seen: [T, S], what the order of the loop leaves to see.
    """
    seen = seen[None, None, None, None]
    if visibility.first is not None:
        # Slots before a row's first position hold what other layers or no row computed.
        begun = key_slots >= visibility.first[..., None]  # [L, B, S]
        seen = seen & begun[:, :, None, None, None, :]
    if visibility.segments is not None:
        ours, theirs = (
            jnp.take(visibility.segments, slots, axis=2)
            for slots in (query_slots, key_slots)
        )
        same = ours[..., :, None] == theirs[..., None, :]
        seen = seen & same[:, :, None, None]
    bias = jnp.where(seen, 0.0, HIDDEN).astype(dtype)
    if visibility.slopes is not None:
        # Slots of one layer are as far apart as its positions.
        distance = query_slots[:, None] - key_slots
        bias = bias - visibility.slopes[..., None, None] * distance.astype(dtype)
    # Computed once for all rows, and out of the exponentials' loop: with integers in it
    # XLA does not vectorise that one on CPU.
    return jax.lax.optimization_barrier(bias)


def bias_of_cache(
    visibility: Visibility,
    positions: Int[Array, "L T #B"],
    cache: RecurrentCache,
    spec: LayerSpec,
    dtype,
) -> Float[Array, "L B #K #Q T S"]:
    """Returns biases [L, B, K or 1, Q or 1, T, S + open] for the cache's pairs.

    A persistent pair is seen from later blocks, a temporary one from its own block.

    Args:
      positions: positions of the queries, [L, T, B].
    """
    # Slot s of the persistent pairs holds position s; after them come the open block's
    # temporary pairs, which start at the block's first position.
    c = spec.block
    seen_before = cache.position[:, None]  # [B, 1]
    slots = jnp.arange(cache.slots)
    open_block = seen_before // c * c
    opened = open_block + jnp.arange(cache.temporary_keys.shape[2])  # [B, open]
    at = jnp.concatenate(
        [jnp.broadcast_to(slots, (opened.shape[0], slots.size)), opened], 1
    )
    filled = at < seen_before
    persistent = jnp.arange(at.shape[1]) < slots.size
    query = jnp.moveaxis(positions, 1, 2)[..., None]  # [L, B, T, 1]
    # In a query's own block its temporary pair counts, in earlier ones the persistent.
    same_block = at[:, None] // c == query // c
    seen = filled[:, None] & (same_block != persistent)
    bias = jnp.where(seen, 0.0, HIDDEN).astype(dtype)[:, :, None, None]
    if visibility.slopes is not None:
        distance = (query - at[:, None]).astype(dtype)[:, :, None, None]
        bias = bias - visibility.slopes[..., None, None] * distance
    return bias


def step_slots(step: Array, geometry: Geometry) -> Int[Array, " b"]:
    """Returns the slots [b] of a step."""
    return step * geometry.tile + jnp.arange(geometry.tile)


def chunk_slots(index: Array, geometry: Geometry) -> Int[Array, " chunk"]:
    """Returns the slots of a chunk of keys."""
    return index * geometry.chunk + jnp.arange(geometry.chunk)


def visibility_of(
    cache: RecurrentCache,
    segments: Int[Array, "slots B"] | None,
    phase: Int[Array, " B"] | None,
    geometry: Geometry,
    spec: LayerSpec,
    dtype,
) -> Visibility:
    """Collects what the biases need; `segments` are by slot of layer 0, [slots, B]."""
    late = geometry.lags() * geometry.tile
    start = cache.position if cache.slots else jnp.zeros(1, jnp.int32)
    first = None
    if geometry.depth > 1 or phase is not None:
        shift = jnp.zeros(1, jnp.int32) if phase is None else phase
        # Slot of a row's first position: later by a tile a layer, and by its place in a
        # block.
        first = late[:, None] + shift
    if segments is not None:
        rows = jnp.moveaxis(segments, 0, 1)  # [B, slots]
        # Documents by slot, for each layer at its own lag.
        segments = jax.vmap(lambda late: jnp.roll(rows, late, axis=1))(late)
    return Visibility(
        slopes=alibi_slopes(spec, dtype),
        origin=start if phase is None else start - phase,
        first=first,
        segments=segments,
    )


def own_unit_bias(
    visibility: Visibility, j, geometry: Geometry, dtype
) -> Float[Array, "#L #B #K #Q units u u"]:
    """Returns biases [L or 1, B or 1, K or 1, Q or 1, units, u, u] within the units."""

    def of_unit(slots):
        return bias_of_slots(visibility, slots, slots, slots[:, None] >= slots, dtype)

    slots = step_slots(j, geometry).reshape(geometry.units, geometry.unit)
    return jax.vmap(of_unit, out_axes=4)(slots)


def tile_bias(
    visibility: Visibility, j, geometry: Geometry, dtype
) -> Float[Array, "#L #B #K #Q b b"]:
    """Returns biases [..., b, b] between a tile's queries and its earlier units."""
    slots = step_slots(j, geometry)
    unit = jnp.arange(geometry.tile) // geometry.unit
    return bias_of_slots(visibility, slots, slots, unit[:, None] > unit, dtype)


def prefix_bias(
    visibility: Visibility, j, chunk, geometry: Geometry, dtype
) -> Float[Array, "#L #B #K #Q b chunk"]:
    """Returns biases [..., b, chunk] for keys of earlier tiles."""
    keys = chunk_slots(chunk, geometry)
    # A chunk may end in the middle of what is not computed yet.
    before = jnp.broadcast_to(keys < j * geometry.tile, (geometry.tile, keys.size))
    return bias_of_slots(visibility, step_slots(j, geometry), keys, before, dtype)


def prefix_chunks(j, geometry: Geometry):
    """Returns how many chunks of keys hold all earlier tiles."""
    return -(-j * geometry.tile // geometry.chunk)


class Pairs(NamedTuple):
    """Keys [L, B, K, E, S] and values [L, B, K, S, E]."""

    keys: Array
    values: Array


def empty_pairs(layers: int, batch: int, slots: int, spec: LayerSpec, dtype) -> Pairs:
    """Creates zeros for `slots` pairs."""
    shape = (layers, batch, spec.key_heads)
    E = spec.head_width
    return Pairs(
        jnp.zeros((*shape, E, slots), dtype), jnp.zeros((*shape, slots, E), dtype)
    )


def put(pairs: Pairs, new: Pairs, start) -> Pairs:
    """Writes pairs from slot `start` on."""
    update = jax.lax.dynamic_update_slice_in_dim
    return Pairs(
        update(pairs.keys, new.keys, start, axis=4),
        update(pairs.values, new.values, start, axis=3),
    )


def cut(pairs: Pairs, start, size: int) -> Pairs:
    """Slices `size` slots from `start` on."""
    read = jax.lax.dynamic_slice_in_dim
    return Pairs(
        read(pairs.keys, start, size, axis=4), read(pairs.values, start, size, axis=3)
    )


def from_rows(k: Float[Array, "L T B K E"], v: Float[Array, "L T B K E"]) -> Pairs:
    """Turns rows [L, T, B, K, E] into pairs."""
    return Pairs(jnp.moveaxis(k, 1, 4), jnp.moveaxis(v, 1, 3))


def to_rows(
    pairs: Pairs,
) -> tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]]:
    """Turns pairs into rows [L, T, B, K, E]."""
    return jnp.moveaxis(pairs.keys, 4, 1), jnp.moveaxis(pairs.values, 3, 1)


def each(pairs: Pairs, function: Callable[[Array, int], Array]) -> Pairs:
    """Applies `function(part, axis of its slots)` to both parts."""
    return Pairs(function(pairs.keys, 4), function(pairs.values, 3))


def cached_pairs(cache: RecurrentCache, spec: LayerSpec) -> Pairs | None:
    """Returns the cache's persistent pairs, then the open block's temporary ones."""
    if not cache.slots:
        return None
    keys = jnp.concatenate([cache.keys, cache.temporary_keys], axis=2)
    values = jnp.concatenate([cache.values, cache.temporary_values], axis=2)
    keys, values = keys.astype(spec.dtype), values.astype(spec.dtype)
    return Pairs(jnp.moveaxis(keys, 2, 4), jnp.moveaxis(values, 2, 3))


def queries_and_pairs(
    x: Float[Array, "L T B D"],
    w: PreparedWeights,
    rotary: Rotary | None,
    spec: LayerSpec,
) -> tuple[Float[Array, "L B K Q T E"], Pairs]:
    """Projects rows [L, T, B, D] into queries [L, B, K, Q, T, E] and own pairs."""
    flat = linear(pre_norm(x, w.attention_norm, spec), w.w_qkv, w.b_qkv)
    heads = heads_of_projections(flat, w.q_norm, w.k_norm, rotary, spec)
    return jax.tree.map(lambda part: part.astype(spec.dtype), heads)


def heads_of_projections(
    flat: Float[Array, "L T B N"],
    q_norm: NormParameters,
    k_norm: NormParameters,
    rotary: Rotary | None,
    spec: LayerSpec,
) -> tuple[Float[Array, "L B K Q T E"], Pairs]:
    """Turns rows of w_qkv's output into queries and pairs, still wide."""
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    q, k, v = jnp.split(flat, [H * E, (H + K) * E], axis=-1)
    q = norm_and_rotate(q, q_norm, rotary, spec)
    q = jnp.moveaxis(q.reshape(*q.shape[:3], K, H // K, E), 1, 4)
    k = norm_and_rotate(k, k_norm, rotary, spec)
    return q, from_rows(k, v.reshape(k.shape))


def pairs_of(
    k: Float[Array, "L T B KE"],
    v: Float[Array, "L T B KE"],
    w: PreparedWeights,
    rotary: Rotary | None,
    spec: LayerSpec,
) -> Pairs:
    """Turns projections [L, T, B, K E] into pairs."""
    k = norm_and_rotate(k, w.k_norm, rotary, spec).astype(spec.dtype)
    return from_rows(k, v.reshape(k.shape).astype(spec.dtype))


class SoftmaxSoFar(NamedTuple):
    """State of queries [L, B, K, Q, T] that have read a part of their keys.

    Attributes:
      largest: m, the largest logit so far.
      normalizer: l = sum of exp(logit - m).
      weighted: sum of exp(logit - m) v, [..., T, E].
    """

    largest: Array
    normalizer: Array
    weighted: Array


def merge(
    running: SoftmaxSoFar,
    logits: Float[Array, "L B K Q T S"],
    v: Float[Array, "L B K S E"],
    dtype,
) -> SoftmaxSoFar:
    """Adds keys: logits [L, B, K, Q, T, S], v [L, B, K, S, E]."""
    largest = jnp.maximum(running.largest, reductions.largest(logits))
    shrink = jnp.exp(running.largest - largest)
    p = jnp.exp(logits - largest[..., None])
    return SoftmaxSoFar(
        largest,
        running.normalizer * shrink + jnp.sum(p, axis=-1),
        running.weighted * shrink[..., None] + weigh(p, v, dtype),
    )


def finish(
    running: SoftmaxSoFar,
) -> tuple[Float[Array, "L B K Q T E"], Float[Array, "L B K Q T"]]:
    """Returns the attended values and the log of the sum of exp(logits)."""
    attended = running.weighted / running.normalizer[..., None]
    return attended, running.largest + jnp.log(running.normalizer)


def logits_of(
    q: Float[Array, "L B K Q T E"], k: Float[Array, "L B K E S"], scale: float
) -> Float[Array, "L B K Q T S"]:
    """Returns scale q k^T, [L, B, K, Q, T, S]; k is [L, B, K, E, S]."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("lbkqte,lbkes->lbkqts", q, k, preferred_element_type=wide)
    return logits * scale


def weigh(
    p: Float[Array, "L B K Q T S"], v: Float[Array, "L B K S E"], dtype
) -> Float[Array, "L B K Q T E"]:
    """Returns p v with operands in `dtype`, accumulated in p's."""
    return jnp.einsum(
        "lbkqts,lbkse->lbkqte", p.astype(dtype), v, preferred_element_type=p.dtype
    )
