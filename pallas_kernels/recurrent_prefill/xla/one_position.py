"""A decode step of the XLA path: one position, straight from the cache and the weights.

The loops over tiles lay weights and cached pairs out for many positions, which pays
where many read them. One position reads everything once, so that a copy of anything
would double its bytes. A layer needs w_k and w_v twice, though: for the temporary pair
of its input and, after its MLP, for the persistent pair of its output. Only later
positions read that one, so it is left to the next step, which makes both in one
product.

Products take the weights as they are given, and attention reads the cache in place: by
sums of products, which XLA fuses with the layer's slice; on a CPU, where products of
matrices are several times faster, by `few_queries`. On a GPU each product has an input
of its own (`uncopied_weights`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from pallas_kernels import few_queries, reductions, target, uncopied_weights
from pallas_kernels.mesh_cut import COLUMN_AXIS, as_it_lies, free_axes, row_axes
from pallas_kernels.recurrent_prefill.call import (
    Array,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    RecurrentPrefillCall,
)
from pallas_kernels.recurrent_prefill.equations import (
    HIDDEN,
    activate,
    linear,
    norm_and_rotate,
    pre_norm,
    rotation,
)
from pallas_kernels.recurrent_prefill.xla.attention import alibi_slopes


def serves(call: RecurrentPrefillCall) -> bool:
    """Returns whether a call is such a step."""
    if call.options.stages.count > 1:
        return False
    if call.x.shape[1] > 1 or not call.cache.slots or call.spec.block > 1:
        return False  # A block's temporary pairs are a second cache.
    on_cpu = target.current().platform == "cpu"
    return not on_cpu or few_queries.pay_off(1, call.spec.heads)


def forward(
    call: RecurrentPrefillCall,
) -> tuple[Float[Array, "B 1 D"], RecurrentCache]:
    """Runs one more position of every row through L layers, one after the other."""
    (x, weights, cache, rows, _), spec = call, call.spec
    wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), spec.dtype)
    # Rows of the position itself, then those of the one before: [1, 2 B].
    positions = jnp.concatenate([cache.position, cache.written])[None]
    rotary = rotation(positions, spec, wide)
    bias = _bias(cache, spec, wide)
    # A row without a token stays as it is, to the bit: its pair is left, too.
    count = jnp.ones_like(cache.position) if rows.lengths is None else rows.lengths
    goes_on = count > 0
    slot = jnp.where(goes_on, _pending_slot(cache), cache.slots)
    batch = jnp.arange(x.shape[0])
    # XLA turns one row's scatter into slices and a select between two full caches; a
    # second row, which is dropped, keeps it a scatter.
    alone = x.shape[0] == 1
    if alone:
        slot, batch = jnp.append(slot, cache.slots + 1), jnp.zeros(2, batch.dtype)

    # The cache is carried, though no layer reads another's pairs: XLA converts what a
    # loop does not change to its preferred layout before the loop.
    def layer(carry, inputs):
        x, slots = carry
        number, w, source = inputs
        w = jax.tree.map(lambda leaf: leaf[None], w)
        q, pairs, pending = _queries_and_pairs(x, source[None], w, rotary, spec)
        pending = (jnp.repeat(pair, 2 if alone else 1, axis=0) for pair in pending)
        slots = tuple(
            part.at[number, batch, slot].set(
                as_it_lies(pair.astype(part.dtype), rows=0, columns=(1,)),
                mode="drop",
                unique_indices=True,
            )
            for part, pair in zip(slots, pending, strict=True)
        )
        # Pairs [B, S, K, E] by heads, or by slots where they are too few.
        old = tuple(as_it_lies(part[number], rows=0, columns=(2, 1)) for part in slots)
        z, cached = _output(x, _attend(q, pairs, old, bias, spec), w, spec)
        cached = jnp.where(goes_on[:, None], cached[0].astype(source.dtype), source)
        return (z, slots), cached

    start = x.astype(wide).swapaxes(0, 1)  # [1, B, D]: rows of one layer
    numbers = jnp.arange(weights.w_q.shape[0])
    (z, (keys, values)), source = jax.lax.scan(
        layer,
        (start, (cache.keys, cache.values)),
        (numbers, weights, cache.source),
        # In a loop XLA copies each layer's weights out of the stack before it
        # multiplies by them; a layer with a constant index is read in place. On a CPU
        # that gains nothing, and L layers would take L times as long to compile.
        unroll=target.current().platform != "cpu",
    )
    cache = cache._replace(
        keys=keys,
        values=values,
        source=source,
        position=cache.position + count.astype(cache.position.dtype),
        written=jnp.where(goes_on, cache.position, cache.written),
    )
    return z.swapaxes(0, 1).astype(x.dtype), cache


def backward(
    call: RecurrentPrefillCall,
    cotangents: tuple[Float[Array, "B 1 D"], RecurrentCache],
) -> RecurrentPrefillCall:
    """Returns the call's gradients in place of its arrays; recomputes the step."""
    x, weights, cache, _, _ = call
    dz, dcache = cotangents

    def step(x, weights, keys, values, source):
        old = cache._replace(keys=keys, values=values, source=source)
        z, new = forward(call._replace(x=x, weights=weights, cache=old))
        return z, new.keys, new.values, new.source

    floats = cache.keys, cache.values, cache.source
    _, pull = jax.vjp(step, x, weights, *floats)
    dx, dw, dk, dv, dsource = pull((dz, dcache.keys, dcache.values, dcache.source))
    dcache = dcache._replace(keys=dk, values=dv, source=dsource)
    return call.with_gradients(dx, dw, dcache)


def write_pending(
    weights: LayerWeights, cache: RecurrentCache, *, spec: LayerSpec
) -> RecurrentCache:
    """Writes the pairs that a step has left: all are in the slots then."""
    wide = jnp.promote_types(jnp.float32, spec.dtype)
    rotary = rotation(cache.written[None], spec, wide)
    slot, batch = _pending_slot(cache), jnp.arange(cache.position.shape[0])
    pairs = _pairs(cache.source, cache.source, weights, rotary, spec)
    keys, values = (
        part.at[:, batch, slot].set(
            pair.astype(part.dtype), mode="drop", unique_indices=True
        )
        for part, pair in zip((cache.keys, cache.values), pairs, strict=True)
    )
    return cache._replace(keys=keys, values=values, written=cache.position)


def _pending_slot(cache: RecurrentCache) -> Int[Array, " B"]:
    """Returns where each row's pending pair goes; out of range where it has none."""
    pending = cache.written < cache.position
    return jnp.where(pending, cache.written, cache.slots)


def _queries_and_pairs(x, source, w: LayerWeights, rotary, spec: LayerSpec):
    """Returns q [B, K, Q, E], the temporary pair and the pending one, [B, K, E] each.

    Args:
      x, source: [1, B, D]: the layer's input, and what the pending pair is made of.
      rotary: rotary tables of x's rows, then of the source's.
    """
    B = x.shape[1]
    normed = pre_norm(x, (w.attention_norm_scale, w.attention_norm_bias), spec)
    for_q, for_k, for_v = _apart(normed, 3, spec)
    of_x = jax.tree.map(lambda table: table[:, :B], rotary)
    q = _product(for_q, w.w_q, w.b_q, spec)
    q = norm_and_rotate(q, (w.q_norm_scale, w.q_norm_bias), of_x, spec)
    q = q.reshape(B, spec.key_heads, -1, spec.head_width).astype(spec.dtype)

    def both(rows):
        return jnp.concatenate([rows, source.astype(rows.dtype)], axis=1)

    k, v = (pair[0] for pair in _pairs(both(for_k), both(for_v), w, rotary, spec))
    return q, (k[:B], v[:B]), (k[B:], v[B:])


def _pairs(for_k, for_v, w: LayerWeights, rotary, spec: LayerSpec):
    """Returns the keys and values, [L, B, K, E], of rows [L, B, D]."""
    heads = (spec.key_heads, spec.head_width)
    k = _product(for_k, w.w_k, w.b_k, spec)
    k = norm_and_rotate(k, (w.k_norm_scale, w.k_norm_bias), rotary, spec)
    v = _product(for_v, w.w_v, w.b_v, spec)
    return tuple(
        part.reshape(*for_k.shape[:2], *heads).astype(spec.dtype) for part in (k, v)
    )


def _output(x, attended, w: LayerWeights, spec: LayerSpec):
    """Returns z, and what its persistent pair is projected from, [1, B, D] each.

    As the README has the layer: y = x + s a, z = y + s MLP(norm y).
    """
    y = x + spec.residual_scale * _merge(attended, w, spec)
    normed = pre_norm(y, (w.mlp_norm_scale, w.mlp_norm_bias), spec)
    for_up, for_gate = _apart(normed, 2, spec)
    pre = _product(for_up, w.w_up, w.b_up, spec)
    gated = w.w_gate is not None
    if gated:
        gate = _product(for_gate, w.w_gate, w.b_gate, spec)
        pre = jnp.concatenate([pre, gate], axis=-1)
    hidden = activate(pre, spec, gated=gated)
    z = y + spec.residual_scale * _product(hidden, w.w_down, w.b_down, spec)
    attention_norm = (w.attention_norm_scale, w.attention_norm_bias)
    return z, pre_norm(z, attention_norm, spec) if spec.normed_persistent else z


def _product(x, weight, bias, spec: LayerSpec):
    """Multiplies [L, B, N] by a weight whose heads, if it has any, are columns."""
    L, _, N = x.shape
    flat = weight.reshape(L, N, -1).astype(spec.dtype)
    bias = None if bias is None else bias.reshape(L, -1)
    if L > 1:
        return linear(x, flat, bias)
    multiply = lambda rows: linear(rows[None], flat, bias)[0]  # noqa: E731
    return uncopied_weights.with_more_rows(multiply, x[0].astype(spec.dtype))[None]


def _apart(source, products: int, spec: LayerSpec):
    """Gives each product its own source, in the dtype that it multiplies in."""
    if not uncopied_weights.pay_off():
        return (source,) * products
    return uncopied_weights.apart(source.astype(spec.dtype), products)


def _merge(attended: Float[Array, "B K Q E"], w: LayerWeights, spec: LayerSpec):
    """Computes w_out's product: head by head, or of all heads side by side."""
    B = attended.shape[0]
    if not uncopied_weights.pay_off():
        flat = w.w_out.reshape(1, -1, w.w_out.shape[-1])
        return _product(attended.reshape(1, B, -1), flat, w.b_out, spec)
    by_head = attended.reshape(B, -1, spec.head_width)
    merged = uncopied_weights.merge_by_head(by_head, w.w_out[0].astype(spec.dtype))
    return merged[None] if w.b_out is None else merged[None] + w.b_out


def _beside_slots(x: Array, *, slots: int | None = None) -> Array:
    """Shards x as a cache cut by slots, as with few heads; `slots` is an axis.

    Left to itself, the compiler cuts queries and weights by heads, as the products
    around attention are cut, and gathers the cached pairs to meet them.
    """
    cut: list[Any] = [row_axes(x.shape[0]) or None, *[None] * (x.ndim - 1)]
    if slots is not None:
        cut[slots] = COLUMN_AXIS
    return jax.lax.with_sharding_constraint(x, P(*cut))


def _attend(
    q: Float[Array, "B K Q E"], pair: tuple, pairs: tuple, bias: Array, spec: LayerSpec
) -> Float[Array, "B K Q E"]:
    """Attends to the cached pairs [B, S, K, E] and the own one, [B, K, E]."""
    wide = bias.dtype
    (own_k, own_v), (k, v) = pair, pairs
    on_cpu = target.current().platform == "cpu"
    logits_of, weigh = _PRODUCTS if on_cpu else _SUMS
    shards = free_axes().get(COLUMN_AXIS, 1)
    by_slots = q.shape[1] % shards > 0 and k.shape[1] % shards == 0
    if by_slots:
        q, own_k, own_v = (_beside_slots(array) for array in (q, own_k, own_v))
    logits = logits_of(q, k, wide) * spec.logit_scale + bias  # [B, S, K, Q]
    if by_slots:
        logits = _beside_slots(logits, slots=1)
    q = q.astype(wide)
    of_own = jnp.sum(q * own_k[:, :, None].astype(wide), axis=-1) * spec.logit_scale
    largest = jnp.maximum(of_own, reductions.largest(logits, axis=1))
    p, p_own = jnp.exp(logits - largest[:, None]), jnp.exp(of_own - largest)
    weighted = weigh(p, v) + p_own[..., None] * own_v[:, :, None].astype(wide)
    attended = weighted / (jnp.sum(p, axis=1) + p_own)[..., None]
    return _beside_slots(attended) if by_slots else attended


def _logits_by_sums(q, k, wide) -> Float[Array, "B S K Q"]:
    # Matrix products would copy and transpose the layer's slice of the cache before
    # they read it.
    return jnp.sum(q[:, None].astype(wide) * k[:, :, :, None].astype(wide), axis=-1)


def _logits_by_products(q, k, wide) -> Float[Array, "B S K Q"]:
    B, K, Q, E = q.shape
    logits = few_queries.few_logits(q.reshape(B, 1, K * Q, E), k, wide)  # [B, H, 1, S]
    return logits.reshape(B, K, Q, -1).transpose(0, 3, 1, 2)


def _weigh_by_products(p, v) -> Float[Array, "B K Q E"]:
    B, S, K, Q = p.shape
    # Not rounded to the cache's dtype: one that is held wide gives the same bits.
    weights = p.reshape(B, S, K * Q).swapaxes(1, 2)  # [B, H, S]
    mixtures = few_queries.few_mixtures(weights[:, :, None], v, p.dtype)
    return mixtures.reshape(B, K, Q, -1)


_SUMS = _logits_by_sums, few_queries.summed_mixtures
_PRODUCTS = _logits_by_products, _weigh_by_products


def _bias(cache: RecurrentCache, spec: LayerSpec, dtype) -> Float[Array, "B S #K #Q"]:
    """Returns what is added to the logits of the cached pairs."""
    # Slot s holds position s; those from the row's own position on hold nothing yet.
    distance = cache.position[:, None] - jnp.arange(cache.slots)
    bias = jnp.where(distance > 0, 0.0, HIDDEN).astype(dtype)[:, :, None, None]
    slopes = alibi_slopes(spec, dtype)
    if slopes is None:
        return bias
    return bias - slopes * distance.astype(dtype)[:, :, None, None]
