"""The backward pass of the Pallas backends: layouts, layers, cache; tiles in reverse.

A step takes one tile of each of L layers, layer l a tile behind layer l - 1 as in the
forward loop, from the last tile to the first. The tile's keys first take their
gradients from the queries of later tiles; then the backend's kernels run through its
positions in reverse; then the gradients of the weights and of x are formed for the full
tile.

XLA forms these, for many rows at once: rows are [L, ..., width], as in `equations`;
operands of products are in spec.dtype and accumulate in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import (
    Array,
    LayerSpec,
    RecurrentCache,
    RecurrentPrefillCall,
    Residuals,
)
from pallas_kernels.recurrent_prefill.equations import (
    NormParameters,
    PreparedWeights,
    Rotary,
    activate,
    linear,
    norm,
    norm_and_rotate,
    pre_norm,
    prepare,
)
from pallas_kernels.recurrent_prefill.tiles.layout import (
    Active,
    Tiles,
    from_slots,
    put_in_order,
    put_in_slots,
    queries_and_pairs,
)


def written_cotangents(
    call: RecurrentPrefillCall, dcache: RecurrentCache
) -> tuple[Array, Array]:
    """Returns the cache's gradients of the new pairs, float32 [L, B, T, K E]."""
    at, real = _written(call)
    at = jnp.minimum(at, call.cache.slots - 1)

    def take(part: Array) -> Array:
        part = part.reshape(*part.shape[:3], -1).astype(jnp.float32)
        part = part[:, jnp.arange(at.shape[0])[:, None], at]
        return jnp.where(real[..., None], part, 0.0)

    return take(dcache.keys), take(dcache.values)


def _written(call: RecurrentPrefillCall) -> tuple[Array, Array]:
    """Returns the slots [B, T] that a call writes, and which of them it does write."""
    T, lengths = call.x.shape[1], call.rows.lengths
    at = call.cache.position[:, None] + jnp.arange(T)
    count = T if lengths is None else lengths[:, None]
    return at, (jnp.arange(T) < count) & (at < call.cache.slots)


def old_cache_cotangents(
    call: RecurrentPrefillCall,
    dcache: RecurrentCache,
    dslots: tuple[Array, Array] | None,
) -> RecurrentCache:
    """Adds what passes through the slots that the call did not write."""
    cache = call.cache
    floats = cache._replace(position=None, written=None)
    zeros = jax.tree.map(jnp.zeros_like, floats)
    if dslots is None:
        return zeros
    # A slot that the call wrote replaced the old one, so the new pair has its gradient.
    at, real = _written(call)
    at = jnp.where(real, at, cache.slots)  # out of range: dropped
    batch = jnp.arange(at.shape[0])[:, None]

    def pass_through(through: Array, added: Array, old: Array) -> Array:
        through = through.at[:, batch, at].set(0, mode="drop")
        return through.astype(old.dtype) + from_slots(added, old)

    return zeros._replace(
        keys=pass_through(dcache.keys, dslots[0], cache.keys),
        values=pass_through(dcache.values, dslots[1], cache.values),
    )


class Known(NamedTuple):
    """The forward pass' values that the backward loop reads, by position.

    Attributes:
      normed: n'(y), what the MLP reads, [L, ..., D].
      hidden: what w_down reads, [L, ..., F].
      slopes: d hidden / d pre of up or, with a gate, of up then gate, [L, ..., p F].
      unit_y, unit_z: y and z standardised, before the norms' scales.
      factor_y, factor_z: what standardising multiplied by, [L, ...].
      source: what the persistent pair was projected from, [L, ..., D].
      raw_k: keys before the k-norm, [L, ..., K E]; unit_k and factor_k: standardised.
      keys, values: the persistent pairs [L, ..., K E], in spec.dtype.
      rotary: at the positions, None without RoPE.
    """

    normed: Array
    hidden: Array
    slopes: Array
    unit_y: Array
    factor_y: Array
    unit_z: Array
    factor_z: Array
    source: Array
    raw_k: Array
    unit_k: Array
    factor_k: Array
    keys: Array
    values: Array
    rotary: Rotary | None


class PositionGradients(NamedTuple):
    """Cotangents that the loop over positions found, float32 unless said otherwise.

    Attributes:
      dy, dz: gradients of the two residual sums, [L, ..., D].
      dnormed_y, dnormed_z: gradients of the normed y and z, [L, ..., D].
      dpre: gradient of the MLP's first product, in spec.dtype, [L, ..., p F].
      dk, dv: gradients of the persistent pairs, keys before rotation, [L, ..., K E].
    """

    dy: Array
    dz: Array
    dnormed_y: Array
    dnormed_z: Array
    dpre: Array
    dk: Array
    dv: Array


def recompute(
    x: Float[Array, "L b B D"],
    z: Float[Array, "L b B D"],
    attended: Float[Array, "L b B HE"],
    w: PreparedWeights,
    spec: LayerSpec,
    rotary: Rotary | None,
) -> Known:
    """Works out a layer's inner values from its input, output and attended values."""
    # The forward pass kept a layer's output and what it attended; everything between
    # follows from them and the input, for a full tile in a few large products.
    y = x + spec.residual_scale * linear(attended, w.w_out, w.b_out)
    normed = pre_norm(y, w.mlp_norm, spec)
    pre = linear(normed, w.w_in, w.b_in)
    # A gated layer has up and gate side by side: twice as many columns as w_down has
    # rows.
    gated = w.w_in.shape[-1] != w.w_down.shape[1]
    hidden, back = jax.vjp(lambda pre: activate(pre, spec, gated=gated), pre)
    # The activation acts on each entry alone, so that its gradient is a factor.
    (slopes,) = back(jnp.ones_like(hidden))
    source, raw_k, keys, values = persistent(z, w, spec, rotary)
    kind = spec.norm if spec.normed_persistent else "none"
    # Norms as the kernels take them back: the row before its scale, and the factor.
    unit_y, factor_y = standardise(y, spec.norm, spec.norm_eps)
    unit_z, factor_z = standardise(z, kind, spec.norm_eps)
    unit_k, factor_k = standardise(raw_k, spec.qk_norm, spec.qk_norm_eps)
    return Known(
        normed=normed.astype(spec.dtype),
        hidden=hidden.astype(spec.dtype),
        slopes=slopes.astype(spec.dtype),
        unit_y=unit_y,
        factor_y=factor_y,
        unit_z=unit_z,
        factor_z=factor_z,
        source=source.astype(spec.dtype),
        raw_k=raw_k,
        unit_k=unit_k,
        factor_k=factor_k,
        keys=keys,
        values=values,
        rotary=rotary,
    )


def persistent(
    z: Float[Array, "L T B D"],
    w: PreparedWeights,
    spec: LayerSpec,
    rotary: Rotary | None,
) -> tuple[
    Float[Array, "L T B D"],
    Float[Array, "L T B KE"],
    Float[Array, "L T B KE"],
    Float[Array, "L T B KE"],
]:
    """Returns what pairs are projected from, keys before k-norm, keys and values."""
    source = pre_norm(z, w.attention_norm, spec) if spec.normed_persistent else z
    raw_k, values = jnp.split(linear(source, w.w_kv, w.b_kv), 2, axis=-1)
    keys = norm_and_rotate(raw_k, w.k_norm, rotary, spec).reshape(raw_k.shape)
    return source, raw_k, keys.astype(spec.dtype), values.astype(spec.dtype)


def standardise(
    x: Float[Array, "L ... N"], kind: str, eps: float
) -> tuple[Float[Array, "L ... N"], Float[Array, "L ..."]]:
    """Returns a norm's result before its scale, and the factor [L, ...] it used."""
    if kind == "none":
        return x, jnp.ones(x.shape[:-1], x.dtype)
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
    return x * factor[..., None], factor


def sequential_gradients(
    known: Known,
    attended: Float[Array, "L b B HE"],
    gradients: PositionGradients,
    w: PreparedWeights,
    spec: LayerSpec,
) -> PreparedWeights:
    """Returns gradients of the weights that the loop over positions uses; q's are 0."""
    s = spec.residual_scale
    attention_norm = jax.tree.map(jnp.zeros_like, w.attention_norm)
    if spec.normed_persistent:
        attention_norm = norm_gradients(
            w.attention_norm, known.unit_z, gradients.dnormed_z
        )
    _, back = jax.vjp(
        lambda raw, k_norm: norm(raw, k_norm, spec.qk_norm, spec.qk_norm_eps),
        known.raw_k,
        w.k_norm,
    )
    raw_k, k_norm = back(gradients.dk)
    pair = jnp.concatenate([raw_k, gradients.dv], axis=-1)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)
    return zeros._replace(
        w_kv=contract(known.source, pair, spec),
        b_kv=bias_gradient(w.b_kv, pair),
        w_out=contract(attended, s * gradients.dy, spec),
        b_out=bias_gradient(w.b_out, s * gradients.dy),
        w_in=contract(known.normed, gradients.dpre, spec),
        b_in=bias_gradient(w.b_in, gradients.dpre.astype(jnp.float32)),
        w_down=contract(known.hidden, s * gradients.dz, spec),
        b_down=bias_gradient(w.b_down, s * gradients.dz),
        attention_norm=attention_norm,
        mlp_norm=norm_gradients(w.mlp_norm, known.unit_y, gradients.dnormed_y),
        k_norm=k_norm,
    )


def projections_backward(
    x: Float[Array, "L b B D"],
    dq: Float[Array, "L b B HE"],
    dk: Float[Array, "L b B KE"],
    dv: Float[Array, "L b B KE"],
    w: PreparedWeights,
    spec: LayerSpec,
    rotary: Rotary | None,
) -> tuple[Float[Array, "L b B D"], PreparedWeights]:
    """Maps gradients of q and temporary pairs to those of x and of the weights."""
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    normed, norm_back = jax.vjp(lambda x, p: pre_norm(x, p, spec), x, w.attention_norm)
    flat = linear(normed, w.w_qkv, w.b_qkv, narrow=True)
    q, k, _ = jnp.split(flat, [H * E, (H + K) * E], axis=-1)
    apply_norm = lambda part, p: norm_and_rotate(part, p, rotary, spec).reshape(  # noqa: E731
        part.shape
    )
    dq, q_norm = jax.vjp(apply_norm, q, w.q_norm)[1](dq)
    dk, k_norm = jax.vjp(apply_norm, k, w.k_norm)[1](dk)
    dflat = jnp.concatenate([dq, dk, dv], axis=-1)
    dnormed = linear(dflat, w.w_qkv.swapaxes(1, 2))
    dx, attention_norm = norm_back(dnormed)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)
    return dx, zeros._replace(
        w_qkv=contract(normed, dflat, spec),
        b_qkv=bias_gradient(w.b_qkv, dflat),
        attention_norm=attention_norm,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def contract(
    rows: Float[Array, "L ... N"], cotangents: Float[Array, "L ... M"], spec: LayerSpec
) -> Float[Array, "L N M"]:
    """Returns rows^T cotangents, [L, N, M] from [L, ..., N] and [L, ..., M]."""
    flat = (
        part.astype(spec.dtype).reshape(part.shape[0], -1, part.shape[-1])
        for part in (rows, cotangents)
    )
    return jnp.einsum("lrn,lrm->lnm", *flat, preferred_element_type=jnp.float32)


def bias_gradient(
    bias: Float[Array, "L M"] | None, cotangents: Float[Array, "L ... M"]
) -> Float[Array, "L M"] | None:
    """Returns the gradient of a bias [L, M], None where there is none."""
    if bias is None:
        return None
    return cotangents.reshape(cotangents.shape[0], -1, cotangents.shape[-1]).sum(axis=1)


def norm_gradients(
    parameters: NormParameters,
    unit: Float[Array, "L ... N"],
    cotangents: Float[Array, "L ... N"],
) -> NormParameters:
    """Returns the gradients of a norm's scale and bias, None where there are none."""
    scale, bias = parameters
    return bias_gradient(scale, cotangents * unit), bias_gradient(bias, cotangents)


class LaterQueries(NamedTuple):
    """Queries whose backward is done, by row; T is n tiles of b positions."""

    q: Array  # [L, B, T, H E]
    do: Array  # [L, B, T, H E], gradients of what they attended to
    lse: Array  # [L, B, H, T]
    delta: Array  # [L, B, H, T]


class QueryGradients(NamedTuple):
    """Gradients of a tile's queries and, by query head, of its temporary pairs."""

    dq: Array  # [L, b, B, H E]
    dk_own: Array  # [L, b, B, H E]
    dv_own: Array  # [L, b, B, H E]
    delta: Array  # [L, b, H, B]


class Kernels(NamedTuple):
    """The parts of the loop that a backend brings, for a step of it.

    Attributes:
      later_queries_backward: (keys, values [L, b, B, K E], later, first, at) -> dk, dv
        in float32: of b keys from the queries at index `first` and later, int32 [L, B],
        a multiple of the tile; `at` is the index of key 0 among the queries' positions,
        and keys at `first` or beyond count for nothing.
      positions_backward: (tile, w, known, q, dk, dv) -> what the loop through a tile's
        positions found, and the gradient of what they attended to, [L, b, B, H E].
      queries_backward: (queries, own_k, own_v, keys, values, before) -> gradients of a
        tile's queries and temporary pairs, and delta. `queries` are q, do, attended
        [L, b, B, H E] and lse [L, b, H, B]; keys [L, B, S, K E] hold the tile's own
        too, from slot `before` on, int32 [L, B].
    """

    later_queries_backward: Callable
    positions_backward: Callable
    queries_backward: Callable


KernelsOf = Callable[[Active | None], Kernels]
"""Makes a step's kernels: what they find of a layer that is not active has no meaning.
"""


class LayerTape(NamedTuple):
    """The forward pass' residuals and cotangents, T full tiles, positions first.

    Attributes:
      x: input of each layer, [L, T, B, D].
      z: output of each layer, [L, T, B, D].
      attended: [L, T, B, H E].
      lse: [L, T, H, B].
      dz: gradient of the last layer's output, [T, B, D].
      dkeys, dvalues: gradients of the persistent pairs, [L, T, B, K E], or None.
      segments: documents, [L, T, B], or None.
      rotary: cos and sin, [L, T, B or 1, 1, rope_width / 2], or None.
    """

    x: Array
    z: Array
    attended: Array
    lse: Array
    dz: Array
    dkeys: Array | None
    dvalues: Array | None
    segments: Array | None
    rotary: Rotary | None


class Gradients(NamedTuple):
    """Gradients of x [T, B, D] and weights, and the queries of all positions."""

    x: Array
    weights: PreparedWeights
    queries: LaterQueries


def run_backward(
    call: RecurrentPrefillCall,
    residuals: Residuals,
    cotangents: tuple[Array, RecurrentCache],
    kernels: KernelsOf,
    tiles: Tiles,
    *,
    together: bool,
) -> RecurrentPrefillCall:
    """Returns gradients in place of the arrays.

    Args:
      together: runs all layers in one loop, as a wavefront.
    """
    (x, weights, cache, rows, _), spec = call, call.spec
    dz, dcache = cotangents
    B, T, _ = x.shape
    w = prepare(weights, spec.dtype)
    L = w.w_kv.shape[0]
    start = tiles.start(cache)
    keys, values = tiles.cached_slots(cache, T, spec)
    rotary = tiles.rotation(cache, T, spec)
    by_position = lambda part: tiles.whole_tiles(  # noqa: E731
        part.swapaxes(-3, -2), time=-3 % part.ndim, batch=-2 % part.ndim
    )
    x_rows, dz = (by_position(p.astype(jnp.float32)) for p in (x, dz))
    dwritten = written_cotangents(call, dcache) if cache.slots else None

    def layers(dz, x, w, residuals, keys, values, dwritten):
        """Runs layers whose inputs are x [L, T, B, D] back."""
        # Residuals come batch first, the loop reads positions first. The persistent
        # pairs were not kept: they follow from z.
        count = x.shape[0]
        attended = residuals.attended
        z, attended = map(
            by_position, (residuals.z, attended.reshape(*attended.shape[:3], -1))
        )
        lse = tiles.whole_tiles(
            jnp.transpose(residuals.lse, (0, 2, 3, 1)), time=1, batch=3
        )
        _, _, new_keys, new_values = persistent(z, w, spec, rotary)
        slots, new = (keys, values), (new_keys, new_values)
        if cache.slots:
            layers = jnp.zeros(count, jnp.int32), jnp.ones(count, bool)
            keys, values = put_in_slots(slots, new, start, *layers, T)
        else:
            keys, values = put_in_order(slots, new, 0, T)
        dkeys = dvalues = None
        if dwritten is not None:
            dkeys, dvalues = map(by_position, dwritten)
        documents = rows.segments
        if documents is not None:
            documents = tiles.whole_tiles(documents.T, time=0, batch=1)
            documents = jnp.broadcast_to(documents, (count, *documents.shape))
        # By layer, as all else that the loop over tiles takes apart.
        turns = jax.tree.map(lambda part: jnp.stack([part] * count), rotary)
        of_layers = LayerTape(x, z, attended, lse, dz, dkeys, dvalues, documents, turns)
        out = run_layers_back(
            kernels, of_layers, w, keys, values, start, spec=spec, tile=tiles.tile
        )
        dslots = None
        if cache.slots:
            later_queries_backward = kernels(None).later_queries_backward
            dslots = _cached_slots_backward(
                later_queries_backward, keys, values, out.queries, start, tiles.tile
            )
        return out.x, (out.weights, dslots)

    if together or L == 1:
        below = by_position(residuals.z[:-1])
        stacked = jnp.concatenate([x_rows[None], below])
        dx, (dprepared, dslots) = layers(
            dz, stacked, w, residuals, keys, values, dwritten
        )
    else:

        def layer(dz, inputs_of_layer):
            l, rest = inputs_of_layer
            below = by_position(residuals.z[jnp.maximum(l - 1, 0)])
            x = jnp.where(l == 0, x_rows, below)[None]
            dx, out = layers(dz, x, *jax.tree.map(lambda leaf: leaf[None], rest))
            return dx, jax.tree.map(lambda leaf: leaf[0], out)

        dx, (dprepared, dslots) = jax.lax.scan(
            layer,
            dz,
            (jnp.arange(L), (w, residuals, keys, values, dwritten)),
            reverse=True,
        )
    dx = dx[:T, :B].swapaxes(0, 1).astype(x.dtype)
    _, back = jax.vjp(lambda weights: prepare(weights, jnp.float32), weights)
    (dweights,) = back(dprepared)
    dcache = old_cache_cotangents(call, dcache, dslots)
    return call.with_gradients(dx, dweights, dcache)


def run_layers_back(
    kernels: KernelsOf,
    residuals: LayerTape,
    w: PreparedWeights,
    keys: Float[Array, "L B S KE"],
    values: Float[Array, "L B S KE"],
    start: Int[Array, " B"],
    *,
    spec: LayerSpec,
    tile: int,
) -> Gradients:
    """Runs all layers of `w` back at once.

    Args:
      keys, values: [L, B, S, K E], with the pairs of these T positions in their slots.
      start: how many positions each row had seen, [B].
    """
    b = tile
    L, T, B, D = residuals.x.shape
    n, HE = T // b, residuals.attended.shape[-1]
    tiles = lambda rows: rows.reshape(L, n, b, *rows.shape[2:])  # noqa: E731
    by_tile = jax.tree.map(tiles, residuals._replace(dz=None))
    dz = residuals.dz.reshape(n, b, B, D)
    later = LaterQueries(
        q=jnp.zeros((L, B, T, HE), spec.dtype),
        do=jnp.zeros((L, B, T, HE), spec.dtype),
        lse=jnp.zeros((L, B, spec.heads, T), jnp.float32),
        delta=jnp.zeros((L, B, spec.heads, T), jnp.float32),
    )
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)

    def step(carry, j):
        above, later, total = carry
        # As in the forward loop layer l is at tile j - l. Before its first tile and
        # after its last one its kernels do nothing, and what comes of it is dropped.
        index = j - jnp.arange(L)
        active = (index >= 0) & (index < n)
        tile_index = jnp.clip(index, 0, n - 1)
        rows = jax.tree.map(lambda part: part[jnp.arange(L), tile_index], by_tile)
        # The gradient of a layer's z is that of the next layer's x, one step ago.
        incoming = jnp.concatenate([above[1:], dz[tile_index[-1]][None]])
        incoming = jnp.where(_over(active, incoming), incoming, 0.0)
        dx, gradients, queries = _run_tile_back(
            kernels(Active.at(index, n)),
            rows._replace(dz=incoming),
            w,
            keys,
            values,
            start + (tile_index * b)[:, None],
            later,
            tile_index * b,
            active,
            spec,
        )
        if L > 1:  # Values of inactive layers were never written and may be NaN.
            zero = lambda g: jnp.where(_over(active, g), g, 0.0)  # noqa: E731
            gradients = jax.tree.map(zero, gradients)
        total = jax.tree.map(jnp.add, total, gradients)
        later = _append(later, queries, jnp.where(active, tile_index, n))
        return (dx, later, total), dx[0]

    above = jnp.zeros((L, b, B, D), jnp.float32)
    (_, later, total), dx = jax.lax.scan(
        step, (above, later, total), jnp.arange(n + L - 1), reverse=True
    )
    return Gradients(dx[:n].reshape(T, B, D), total, later)


def _run_tile_back(
    kernels, tile: LayerTape, w, keys, values, before, later, first, active, spec
):
    """Runs one tile back; returns gradients of x and weights, and its queries."""
    L, b, B, _ = tile.x.shape
    q, own_k, own_v = queries_and_pairs(tile.x, w, spec, tile.rotary)
    known = recompute(tile.x, tile.z, tile.attended, w, spec, tile.rotary)
    rows = lambda per_layer: jnp.broadcast_to(  # noqa: E731
        per_layer[:, None], (L, B)
    ).astype(jnp.int32)
    # 1. The tile's pairs, from later tiles and from those who read the new cache.
    dk, dv = kernels.later_queries_backward(
        known.keys, known.values, later, rows(first + b), rows(first)
    )
    if tile.dkeys is not None and tile.dvalues is not None:
        dk, dv = dk + tile.dkeys, dv + tile.dvalues
    dk, dv = (jnp.where(_over(active, part), part, 0.0) for part in (dk, dv))
    # 2. The recurrence in reverse, which also completes dk and dv.
    of_positions, do = kernels.positions_backward(tile, w, known, q, dk, dv)
    # 3. The tile's queries; do is known for all of them.
    queries = (q, do, tile.attended, tile.lse)
    dqueries = kernels.queries_backward(
        queries, own_k, own_v, keys, values, before.astype(jnp.int32)
    )
    # Query heads that share a key head each found a part of its temporary pair's.
    groups = (L, b, B, spec.key_heads, -1, spec.head_width)
    dk_own, dv_own = (
        part.reshape(groups).sum(axis=4).reshape(own_k.shape)
        for part in (dqueries.dk_own, dqueries.dv_own)
    )
    dx, dprojections = projections_backward(
        tile.x, dqueries.dq, dk_own, dv_own, w, spec, tile.rotary
    )
    # 4. The weights', as one product over all rows of the tile.
    gradients = sequential_gradients(known, tile.attended, of_positions, w, spec)
    gradients = jax.tree.map(jnp.add, gradients, dprojections)
    done = LaterQueries(q, do, tile.lse, dqueries.delta)
    return of_positions.dy + dx, gradients, done


def _over(active: Array, of_layers: Array) -> Array:
    """Gives one truth a layer the rank of an array [L, ...]."""
    return active.reshape(-1, *[1] * (of_layers.ndim - 1))


def _append(later: LaterQueries, tile: LaterQueries, index: Array) -> LaterQueries:
    """Puts a tile's queries [L, b, B, ...] into their place; index n is dropped."""
    L, b, B, HE = tile.q.shape
    H, update = tile.lse.shape[2], jax.lax.dynamic_update_slice_in_dim
    layers, batch, heads = jnp.arange(L), jnp.arange(B), jnp.arange(H)

    # One layer's tile is one slice, never dropped. A wavefront's layers are each at its
    # own place: a scatter by the axes in front, or XLA turns the array to have them so.
    def rows(old: Array, new: Array) -> Array:
        new = new.swapaxes(1, 2)
        if L == 1:
            return update(old, new, index[0] * b, axis=2)
        split = old.reshape(L, B, -1, b, HE)
        at = (layers[:, None], batch, index[:, None])
        return split.at[at].set(new, mode="drop").reshape(old.shape)

    def scalars(old: Array, new: Array) -> Array:
        new = jnp.transpose(new, (0, 3, 2, 1))
        if L == 1:
            return update(old, new, index[0] * b, axis=3)
        split = old.reshape(L, B, H, -1, b)
        at = (layers[:, None, None], batch[:, None], heads, index[:, None, None])
        return split.at[at].set(new, mode="drop").reshape(old.shape)

    return LaterQueries(
        rows(later.q, tile.q),
        rows(later.do, tile.do),
        scalars(later.lse, tile.lse),
        scalars(later.delta, tile.delta),
    )


def _cached_slots_backward(
    later_queries_backward: Callable,
    keys: Array,
    values: Array,
    queries: LaterQueries,
    start,
    b: int,
) -> tuple[Array, Array]:
    """Returns dk, dv of the slots filled before the call, from all its queries."""
    L, B, S, _ = keys.shape
    first = jnp.zeros((L, B), jnp.int32)

    def tile(s):
        cut = lambda part: jax.lax.dynamic_slice_in_dim(part, s, b, axis=2)  # noqa: E731
        k, v = (cut(part).swapaxes(1, 2) for part in (keys, values))
        at = jnp.broadcast_to(s - start, (L, B)).astype(jnp.int32)
        return later_queries_backward(k, v, queries, first, at)

    join = lambda part: part.transpose(1, 3, 0, 2, 4).reshape(L, B, S, -1)  # noqa: E731
    dk, dv = jax.lax.map(tile, jnp.arange(0, S, b))
    return join(dk), join(dv)
