"""The backward loop of the XLA path: the forward's steps in reverse.

Activations of a tile are recomputed in one batch from x, z, the attended values and
the log-normalizers. Then its recurrence runs in reverse; then, again in batches, its
queries hand gradients to all earlier pairs, and the weights' gradients add up.

Attention rebuilds its probabilities. With p = exp(logits - lse), delta = sum_e do o:
dv = p^T do;  ds = p (do v^T - delta);  dq = scale ds k;  dk = scale ds^T q.

The recurrence runs from the last unit to the first: the gradient of a unit's persistent
pairs is complete once all later units are done; it leads through z and the MLP to the
gradient of what the unit attended to. Everything else waits until the tile is done.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.call import (
    Array,
    LayerSpec,
    RecurrentCache,
    Residuals,
)
from pallas_kernels.recurrent_prefill.equations import (
    HIDDEN,
    FewRowsMatrices,
    PreparedWeights,
    Rotary,
    activate,
    few_rows_linear,
    few_rows_matrices,
    linear,
    norm_and_rotate,
    persistent_source,
    pre_norm,
    rotation,
    transpose,
)
from pallas_kernels.recurrent_prefill.xla.attention import (
    Pairs,
    Visibility,
    bias_of_cache,
    cached_pairs,
    empty_pairs,
    heads_of_projections,
    logits_of,
    own_unit_bias,
    pairs_of,
    positions_of,
    prefix_bias,
    prefix_chunks,
    put,
    step_slots,
    tile_bias,
    weigh,
)
from pallas_kernels.recurrent_prefill.xla.geometry import (
    Geometry,
    cut_tiles,
    from_above,
    join_tiles,
    of_first_stage,
    skew,
    split_units,
)

Pull = Callable[[Array], tuple[Array]]
"""What `jax.vjp` returns for a function of one array; its residuals are leaves."""


class Attending(NamedTuple):
    """Queries as the backward pass reads them; q and do in spec.dtype.

    Attributes:
      q: [L, B, K, Q, T, E].
      lse: [L, B, K, Q, T].
      do: gradient of the attended values, [L, B, K, Q, T, E].
      delta: [L, B, K, Q, T].
    """

    q: Array
    lse: Array
    do: Array
    delta: Array


class PairColumns(NamedTuple):
    """Pairs as the backward pass reads them, so that it transposes none.

    Keys and values are [L, B, K, E, S], the keys also rows [L, B, K, S, E].
    """

    keys: Array
    values: Array
    key_rows: Array


class PairGradients(NamedTuple):
    """Gradients of keys and values, both [L, B, K, E, S], in a wide dtype."""

    dk: Array
    dv: Array


def columns_of(pairs: Pairs) -> PairColumns:
    """Lays pairs out for the backward pass."""
    keys, values = pairs
    return PairColumns(keys, jnp.swapaxes(values, 3, 4), jnp.swapaxes(keys, 3, 4))


def cut_columns(pairs: PairColumns, start, size: int) -> PairColumns:
    """Slices `size` slots from `start` on."""
    read = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
    keys, values, key_rows = pairs
    return PairColumns(read(keys, axis=4), read(values, axis=4), read(key_rows, axis=3))


def probabilities(
    of: Attending,
    pairs: PairColumns,
    bias: Float[Array, "#L #B #K #Q T S"],
    scale: float,
) -> Float[Array, "L B K Q T S"]:
    """Returns p [L, B, K, Q, T, S], in a wide dtype."""
    logits = logits_of(of.q, pairs.keys, scale) + bias
    return jnp.exp(logits - of.lse[..., None])


def logit_gradients(
    p: Float[Array, "L B K Q T S"],
    do: Float[Array, "L B K Q T E"],
    delta: Float[Array, "L B K Q T"],
    values: Float[Array, "L B K E S"],
) -> Float[Array, "L B K Q T S"]:
    """Returns ds = p (do v^T - delta); values [L, B, K, E, S]."""
    dp = logits_of(do, values, 1.0)
    return p * (dp - delta[..., None])


def query_gradient(
    ds: Float[Array, "L B K Q T S"], key_rows: Float[Array, "L B K S E"], scale: float
) -> Float[Array, "L B K Q T E"]:
    """Returns dq = scale ds k, [L, B, K, Q, T, E]."""
    return scale * weigh(ds, key_rows, key_rows.dtype)


def pair_gradients(
    p: Float[Array, "L B K Q T S"],
    ds: Float[Array, "L B K Q T S"],
    q: Float[Array, "L B K E Q T"],
    do: Float[Array, "L B K E Q T"],
    scale: float,
) -> PairGradients:
    """Returns dk = scale ds^T q and dv = p^T do; q and do are [L, B, K, E, Q, T]."""

    def gather(rows: Array, weights: Array) -> Array:
        return jnp.einsum(
            "lbkeqt,lbkqts->lbkes",
            rows,
            weights.astype(rows.dtype),
            preferred_element_type=weights.dtype,
        )

    return PairGradients(scale * gather(q, ds), gather(do, p))


def attend_backward(
    of: Attending,
    transposed: tuple[Float[Array, "L B K E Q T"], Float[Array, "L B K E Q T"]],
    pairs: PairColumns,
    bias: Float[Array, "#L #B #K #Q T S"],
    scale: float,
) -> tuple[Float[Array, "L B K Q T E"], PairGradients]:
    """Returns the gradients of queries and of the pairs they attend to.

    Args:
      transposed: q and do as [L, B, K, E, Q, T].
    """
    p = probabilities(of, pairs, bias, scale)
    # Five products: logits, dp, dq, dk and dv. The kernels of the Pallas backends pull
    # dk and dv in a pass of their own and make the first two again.
    ds = logit_gradients(p, of.do, of.delta, pairs.values)
    dq = query_gradient(ds, pairs.key_rows, scale)
    return dq, pair_gradients(p, ds, *transposed, scale)


def transpose_queries(
    of: Attending,
) -> tuple[Float[Array, "L B K E Q T"], Float[Array, "L B K E Q T"]]:
    """Returns q and do as [L, B, K, E, Q, T]."""
    return jnp.moveaxis(of.q, 5, 3), jnp.moveaxis(of.do, 5, 3)


def cut_gradients(dpairs: PairGradients, start, size: int) -> PairGradients:
    """Slices `size` slots from `start` on."""
    read = partial(
        jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=4
    )
    return jax.tree.map(read, dpairs)


def own_unit_backward(
    of: Attending, unit: Pairs, visibility, j, geometry: Geometry, spec
) -> tuple[Float[Array, "L B K Q T E"], PairGradients]:
    """Returns gradients of the queries and of the temporary pairs."""
    U, u, wide = geometry.units, geometry.unit, of.delta.dtype

    def by_unit(part: Array, axis: int) -> Array:
        """Moves the units next to the batch: [L, U B, ...]."""
        part = part.reshape(*part.shape[:axis], U, u, *part.shape[axis + 1 :])
        part = jnp.moveaxis(part, axis, 2)
        return part.reshape(part.shape[0], -1, *part.shape[3:])

    # Units do not see each other's temporary pairs: to attention they are more rows of
    # the batch.
    folded = Attending(*(by_unit(part, 4) for part in of))
    pairs = columns_of(Pairs(by_unit(unit.keys, 4), by_unit(unit.values, 3)))
    bias = own_unit_bias(visibility, j, geometry, wide)
    B = of.q.shape[1]
    # The biases follow the pairs into the batch.
    bias = jnp.broadcast_to(bias, (bias.shape[0], B, *bias.shape[2:]))
    bias = jnp.moveaxis(bias, 4, 2)
    bias = bias.reshape(bias.shape[0], -1, *bias.shape[3:])
    dq, dunit = attend_backward(
        folded, transpose_queries(folded), pairs, bias, spec.logit_scale
    )

    def back(part: Array, axis: int) -> Array:
        part = part.reshape(part.shape[0], B, U, *part.shape[2:])
        part = jnp.moveaxis(part, 2, axis)
        return part.reshape(*part.shape[:axis], U * u, *part.shape[axis + 2 :])

    return back(dq, 4), PairGradients(*(back(part, 4) for part in dunit))


def prefix_backward(
    dq: Float[Array, "L B K Q T E"],
    dpairs: PairGradients,
    of: Attending,
    buffers: PairColumns,
    visibility,
    j,
    geometry: Geometry,
    spec,
) -> tuple[Float[Array, "L B K Q T E"], PairGradients]:
    """Adds gradients of the queries and of all pairs of earlier tiles."""
    if geometry.steps == 1:
        return dq, dpairs
    size, transposed = geometry.chunk, transpose_queries(of)

    def attend_chunk(chunk, carry):
        dq, dpairs = carry
        pairs = cut_columns(buffers, chunk * size, size)
        bias = prefix_bias(visibility, j, chunk, geometry, dq.dtype)
        more, new = attend_backward(of, transposed, pairs, bias, spec.logit_scale)
        # Each tile adds to all pairs before it; a pair's gradient is complete when the
        # reverse loop comes to its own tile.
        old = cut_gradients(dpairs, chunk * size, size)
        new = jax.tree.map(jnp.add, old, new)
        write = partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=chunk * size, axis=4
        )
        return dq + more, jax.tree.map(write, dpairs, new)

    return jax.lax.fori_loop(0, prefix_chunks(j, geometry), attend_chunk, (dq, dpairs))


class TileRows(NamedTuple):
    """A tile's activations, recomputed in one batch; rows [L, b, B, ...]."""

    y: Array
    z: Array
    pre: Array
    projected: Array
    attended: Array


class Linearized(NamedTuple):
    """The recurrence's functions of a tile's rows, linearized before its loop.

    Only gradients are sequential, and in a loop of a few rows an operation of XLA for
    CPUs costs more to start than to run.

    Attributes:
      key, source, mlp_norm: from the gradient of a function's output to that of its
        input: `norm_and_rotate` of the persistent key, `persistent_source`, the MLP's
        norm.
      slopes: derivatives of the MLP's activation by each of its inputs, shaped as
        `pre`.
    """

    key: Pull
    source: Pull
    mlp_norm: Pull
    slopes: Array


class RowGradients(NamedTuple):
    """Gradients of a tile's rows [L, b, B, ...], from which the weights' follow.

    Attributes:
      dk: gradient of the persistent keys, [..., K E].
      dprojected: gradient of the persistent pair's projection, [..., 2 K E].
      dsource: gradient of that projection's input.
      dz, dpre, dnormed, dy: gradients of z, the MLP's pre-activations, its normed input
        and y.
    """

    dk: Array
    dprojected: Array
    dsource: Array
    dz: Array
    dpre: Array
    dnormed: Array
    dy: Array


def recur_backward(
    dz: Float[Array, "L b B D"],
    dlater: PairGradients,
    rows: TileRows,
    q: Float[Array, "L B K Q b E"],
    values: Float[Array, "L B K E b"],
    p: Float[Array, "L B K Q b b"],
    rotary: Rotary | None,
    w: PreparedWeights,
    transposed: FewRowsMatrices,
    *,
    geometry: Geometry,
    spec: LayerSpec,
) -> tuple[RowGradients, Float[Array, "L B K Q b E"], Float[Array, "L B K Q b"]]:
    """Runs through a tile's units in reverse.

    Args:
      dz: gradient of z from above, [L, b, B, D].
      dlater: gradients of the tile's persistent pairs from all later tiles.
      rows: the tile's activations.
      q: its queries, [L, B, K, Q, b, E]; values: its persistent ones, [L, B, K, E, b].
      p: probabilities of its queries on its pairs, 0 except on earlier units.

    Returns:
      Gradients of the rows, of the attended values and delta [L, B, K, Q, b].
    """
    L, b, B, _ = dz.shape
    K, E = spec.key_heads, spec.head_width
    U, u = geometry.units, geometry.unit
    s, wide = spec.residual_scale, dz.dtype
    gated = w.w_in.shape[-1] != w.w_down.shape[1]

    def unit(carry, inputs):
        do, delta = carry
        i, dz, dpairs, attended, at, v, p = inputs
        # dk and dv are complete: later tiles' part came in, and the tile's later units
        # have left their do and delta. A unit that is not done yet has do = 0.
        if U > 1:
            # The unit's pairs as seen by all queries of the tile; p is 0 for those
            # before it.
            ds = logit_gradients(p, do, delta, v)
            inside = PairGradients(spec.logit_scale * _gather(ds, q), _gather(p, do))
            dpairs = jax.tree.map(jnp.add, dpairs, inside)
        dk, dv = (jnp.moveaxis(g, 4, 1).reshape(L, u, B, -1) for g in dpairs)
        # Through the k-norm, the pair's projection and its norm to z.
        dprojected = jnp.concatenate([*at.key(_heads(dk, K, E)), dv], axis=-1)
        dsource = few_rows_linear(dprojected, transposed.w_kv)
        dz = dz + at.source(dsource)[0]
        # Through the MLP and its norm to y.
        dhidden = few_rows_linear(s * dz, transposed.w_down)
        if gated:
            dhidden = jnp.concatenate([dhidden, dhidden], axis=-1)
        dpre = at.slopes * dhidden
        dnormed = few_rows_linear(dpre, transposed.w_in)
        dy = dz + at.mlp_norm(dnormed)[0]
        # Through W_out to what the unit attended to.
        new_do = few_rows_linear(s * dy, transposed.w_out)
        new_do = _heads(new_do, spec.heads, E)
        new_delta = jnp.sum(new_do * _heads(attended, spec.heads, E), axis=-1)
        new_do = jnp.moveaxis(new_do.reshape(L, u, B, K, -1, E), 1, 4)
        new_delta = jnp.moveaxis(new_delta.reshape(L, u, B, K, -1), 1, 4)
        update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * u, axis=4)
        carry = update(do, new_do.astype(spec.dtype)), update(delta, new_delta)
        return carry, RowGradients(dk, dprojected, dsource, dz, dpre, dnormed, dy)

    def linearized(rows: TileRows, rotary: Rotary | None) -> Linearized:
        k, _ = jnp.split(rows.projected, 2, axis=-1)
        before = partial(pre_norm, parameters=w.mlp_norm, spec=spec)
        act = partial(activate, spec=spec, gated=gated)
        hidden, pull = jax.vjp(act, rows.pre)
        return Linearized(
            key=_pull_of(lambda k: norm_and_rotate(k, w.k_norm, rotary, spec), k),
            source=_pull_of(partial(persistent_source, w=w, spec=spec), rows.z),
            mlp_norm=_pull_of(before, rows.y),
            # Number by number: both halves of a gated MLP's `pre` reach one output.
            slopes=pull(jnp.ones_like(hidden))[0],
        )

    split = partial(split_units, geometry=geometry)
    inputs = (
        jnp.arange(U),
        split(dz, axis=1),
        jax.tree.map(partial(split, axis=4), dlater),
        split(rows.attended, axis=1),
        jax.vmap(linearized)(
            jax.tree.map(partial(split, axis=1), rows),
            jax.tree.map(partial(split, axis=1), rotary),
        ),
        split(values, axis=4),
        split(p, axis=5),
    )
    zero = jnp.zeros(q.shape, spec.dtype), jnp.zeros(q.shape[:-1], wide)
    (do, delta), gradients = jax.lax.scan(unit, zero, inputs, reverse=True)
    gradients = jax.tree.map(partial(join_tiles, axis=1), gradients)
    return gradients, do, delta


def _gather(weights: Array, rows: Array) -> Array:
    """Returns sum_t weights [L, B, K, Q, T, S] rows [..., T, E] as [L, B, K, E, S].

    The tile's rows have the layout of the loop's carry: turning them over at every unit
    would cost more than the sum.
    """
    gathered = jnp.einsum(
        "lbkqts,lbkqte->lbkse",
        weights.astype(rows.dtype),
        rows,
        preferred_element_type=weights.dtype,
    )
    return jnp.swapaxes(gathered, 3, 4)


def _heads(rows: Array, heads: int, width: int) -> Array:
    return rows.reshape(*rows.shape[:-1], heads, width)


def _pull_of(function: Callable[[Array], Array], at: Array) -> Pull:
    """Returns what maps the gradient of function's value to its argument's."""
    return jax.vjp(function, at)[1]


def zeros_like_weights(w: PreparedWeights, dtype) -> PreparedWeights:
    """Makes the wide accumulators of all weights."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), w)


def add_recurrence(
    total: PreparedWeights,
    g: RowGradients,
    rows: TileRows,
    rotary: Rotary | None,
    w: PreparedWeights,
    spec: LayerSpec,
) -> PreparedWeights:
    """Adds what a tile's recurrence owes to w_kv, w_out and the MLP."""
    s = spec.residual_scale
    # One contraction a weight for the full tile: inside the loop they would be products
    # of a few rows, and the slowest part.
    hidden = activate(rows.pre, spec, gated=w.w_in.shape[-1] != w.w_down.shape[1])
    # Norms again, to get both their output and their parameters' gradient.
    normed, pull_mlp_norm = jax.vjp(lambda p: pre_norm(rows.y, p, spec), w.mlp_norm)
    source, pull_norm = jax.vjp(
        lambda p: persistent_source(rows.z, w._replace(attention_norm=p), spec),
        w.attention_norm,
    )
    k, _ = jnp.split(rows.projected, 2, axis=-1)
    keys, pull_k_norm = jax.vjp(lambda p: norm_and_rotate(k, p, rotary, spec), w.k_norm)
    return _add(
        total,
        w_kv=_product(source, g.dprojected, spec),
        w_out=_product(rows.attended, s * g.dy, spec),
        w_in=_product(normed, g.dpre, spec),
        w_down=_product(hidden, s * g.dz, spec),
        b_kv=_sum(g.dprojected, w.b_kv),
        b_out=_sum(s * g.dy, w.b_out),
        b_in=_sum(g.dpre, w.b_in),
        b_down=_sum(s * g.dz, w.b_down),
        attention_norm=pull_norm(g.dsource)[0],
        mlp_norm=pull_mlp_norm(g.dnormed)[0],
        k_norm=pull_k_norm(g.dk.reshape(keys.shape))[0],
    )


def add_projections(
    total: PreparedWeights,
    normed: Float[Array, "L b B D"],
    dflat: Float[Array, "L b B N"],
    dnorms: dict[str, tuple[Array | None, Array | None]],
    spec: LayerSpec,
) -> PreparedWeights:
    """Adds what a tile's queries and temporary pairs owe.

    Args:
      normed: rows that w_qkv reads; dflat: gradient of what it writes.
      dnorms: gradients of attention_norm, q_norm and k_norm.
    """
    return _add(
        total,
        w_qkv=_product(normed, dflat, spec),
        b_qkv=_sum(dflat, total.b_qkv),
        **dnorms,
    )


def _product(rows: Array, gradients: Array, spec: LayerSpec) -> Array:
    """Contracts rows [L, b, B, N] with [L, b, B, M] to [L, N, M]."""
    wide = gradients.dtype
    # Positions and batch as one axis: with two to contract XLA for CPUs first copies
    # the rows, number by number.
    rows, gradients = (
        part.astype(spec.dtype).reshape(part.shape[0], -1, part.shape[-1])
        for part in (rows, gradients)
    )
    if rows.shape[0] == 1:  # a plain product, as in `linear`
        product = jnp.einsum(
            "tn,tm->nm", rows[0], gradients[0], preferred_element_type=wide
        )
        return product[None]
    return jnp.einsum("ltn,ltm->lnm", rows, gradients, preferred_element_type=wide)


def _sum(gradients: Array, bias: Array | None) -> Array | None:
    return None if bias is None else jnp.sum(gradients, axis=(1, 2))


def _add(total: PreparedWeights, **more: Any) -> PreparedWeights:
    """Adds field by field; None adds nothing."""
    added = {
        name: jax.tree.map(jnp.add, getattr(total, name), new)
        for name, new in more.items()
        if new is not None
    }
    return total._replace(**added)


class CallGradients(NamedTuple):
    """Gradients of x [positions, B, D], of the prepared weights, of cached pairs."""

    x: Array
    weights: PreparedWeights
    cached: PairGradients | None


def run_layers_backward(
    dz: Float[Array, "T B D"],
    dpersistent: PairGradients | None,
    dtemporary: PairGradients | None,
    x: Float[Array, "L T B D"],
    residuals: Residuals,
    w: PreparedWeights,
    cache: RecurrentCache,
    visibility: Visibility,
    *,
    geometry: Geometry,
    spec: LayerSpec,
) -> CallGradients:
    """Propagates the gradient of the last layer's z back through all layers of `w`.

    Args:
      dz: [positions, B, D]; with stages, the last one's z and the first one's x.
      dpersistent, dtemporary: of the new pairs, [L, B, K, E, positions], from
        what became of the cache; None without one.
      x: inputs of all layers, [L, positions, B, D].
    """
    L, b, wide = geometry.layers, geometry.tile, x.dtype
    tiles = partial(_tiles, geometry=geometry)
    # Steps before a layer's first tile, and after its last, run on zeros.
    late = jnp.zeros(((geometry.depth - 1) * b, *dz.shape[1:]), wide)
    # All persistent pairs at once: the forward pass kept z and not them. A tile's
    # gradients of its own pairs are complete when the reverse loop reaches it.
    buffers, dpairs = _persistent(
        residuals.z, dpersistent, w, visibility, geometry, spec
    )
    past = cached_pairs(cache, spec)
    past = None if past is None else columns_of(past)
    transposed = transpose(w)
    matrices = few_rows_matrices(transposed, w, rows=geometry.unit * x.shape[2])

    def step(carry, inputs):
        above, dpairs, dpast, total = carry
        j, dz, dwritten, tile = inputs
        # 1. The tile once more, in one batch: rotary tables, queries, temporary pairs,
        # activations, and the probabilities of its queries on its own persistent pairs.
        dz = from_above(dz, above, geometry)
        positions = positions_of(visibility, step_slots(j, geometry), geometry)
        rotary = rotation(positions, spec, wide)
        normed, pull_norm = jax.vjp(
            lambda x, p: pre_norm(x, p, spec), tile.x, w.attention_norm
        )
        (q, tile_pairs), pull_heads = jax.vjp(
            lambda flat, q, k: heads_of_projections(flat, q, k, rotary, spec),
            linear(normed, w.w_qkv, w.b_qkv),
            w.q_norm,
            w.k_norm,
        )
        q, tile_pairs = jax.tree.map(
            lambda part: part.astype(spec.dtype), (q, tile_pairs)
        )
        pairs = cut_columns(buffers, j * b, b)
        # do and delta are not known yet; probabilities do not read them.
        of = Attending(q, tile.lse, q, tile.lse)
        bias = tile_bias(visibility, j, geometry, wide)
        p = probabilities(of, pairs, bias, spec.logit_scale)
        # 2. The recurrence in reverse: all that is sequential.
        rows = _recompute(tile, w, spec)
        g, do, delta = recur_backward(
            dz,
            cut_gradients(dpairs, j * b, b),
            rows,
            q,
            pairs.values,
            p,
            rotary,
            w,
            matrices,
            geometry=geometry,
            spec=spec,
        )
        # 3. The queries, against the tile's pairs, their own unit's temporary ones,
        # earlier tiles and the cache.
        of = of._replace(do=do, delta=delta)
        ds = logit_gradients(p, do, delta, pairs.values)
        dq = query_gradient(ds, pairs.key_rows, spec.logit_scale)
        more, dunit = own_unit_backward(of, tile_pairs, visibility, j, geometry, spec)
        dq = dq + more
        if dwritten is not None:
            dunit = jax.tree.map(jnp.add, dunit, dwritten)
        dq, dpairs = prefix_backward(
            dq, dpairs, of, buffers, visibility, j, geometry, spec
        )
        if past is not None:
            bias = bias_of_cache(visibility, positions, cache, spec, wide)
            more, new = attend_backward(
                of, transpose_queries(of), past, bias, spec.logit_scale
            )
            dq, dpast = dq + more, jax.tree.map(jnp.add, dpast, new)
        # Back to the layout that the projections wrote: values are rows there.
        dunit = Pairs(dunit.dk, jnp.swapaxes(dunit.dv, 3, 4))
        # 4. Through the projections to x, and the weights' share of this tile.
        dflat, dq_norm, dk_norm = pull_heads((dq, dunit))
        through, dnorm = pull_norm(linear(dflat, transposed.w_qkv))
        total = add_recurrence(total, g, rows, rotary, w, spec)
        norms = {"attention_norm": dnorm, "q_norm": dq_norm, "k_norm": dk_norm}
        total = add_projections(total, normed, dflat, norms, spec)
        dx = g.dy + through
        return (dx, dpairs, dpast, total), dx[0]

    # Outside the sequence a large lse makes every probability 0, and so every gradient.
    lse = skew(residuals.lse, geometry, axis=1, fill=-HIDDEN)
    lse = lse.reshape(*lse.shape[:3], spec.key_heads, -1)
    inputs = (
        jnp.arange(geometry.steps),
        jnp.concatenate([late, dz]).reshape(-1, 1, b, *dz.shape[1:]),
        jax.tree.map(partial(tiles, axis=4), dtemporary),
        _Tile(
            x=tiles(x, axis=1),
            z=tiles(residuals.z, axis=1),
            attended=tiles(residuals.attended, axis=1),
            lse=cut_tiles(jnp.moveaxis(lse, 1, 4), geometry, axis=4),
        ),
    )
    above = jnp.zeros((L, b, *x.shape[2:]), wide)
    dpast = None
    if past is not None:
        dpast = PairGradients(*(jnp.zeros(past.keys.shape, wide) for _ in range(2)))
    first = (above, dpairs, dpast, zeros_like_weights(w, wide))
    (_, _, dpast, total), dx = jax.lax.scan(step, first, inputs, reverse=True)
    dx = dx[: geometry.tiles].reshape(-1, *dx.shape[2:])
    return CallGradients(of_first_stage(dx, geometry), total, dpast)


class _Tile(NamedTuple):
    """The forward pass' residuals, by tile: rows [L, b, B, ...]."""

    x: Array
    z: Array
    attended: Array
    lse: Array  # [L, B, K, Q, b]


def _tiles(rows: Array, *, geometry: Geometry, axis: int) -> Array:
    """Turns positions on `axis` of [L, ...] into [steps, L, ...] for a scan."""
    return cut_tiles(skew(rows, geometry, axis=axis), geometry, axis=axis)


def _persistent(z, dpersistent, w, visibility, geometry: Geometry, spec):
    """Computes all persistent pairs again, and starts their gradients."""
    L, B = z.shape[0], z.shape[2]
    # The pairs were not kept: they follow from z. The biases hide slots outside a
    # layer's positions.
    late = skew(z, geometry, axis=1)
    used = late.shape[1]
    rotary = rotation(
        positions_of(visibility, jnp.arange(used), geometry), spec, z.dtype
    )
    flat = linear(persistent_source(late, w, spec), w.w_kv, w.b_kv)
    k, v = jnp.split(flat, 2, axis=-1)
    pairs = pairs_of(k, v, w, rotary, spec)
    buffers = put(empty_pairs(L, B, geometry.slots, spec, spec.dtype), pairs, 0)
    buffers = columns_of(buffers)
    zero = jnp.zeros(buffers.keys.shape, z.dtype)
    if dpersistent is None:
        return buffers, PairGradients(zero, zero)
    gradients = (skew(part, geometry, axis=4) for part in dpersistent)
    return buffers, PairGradients(*(zero.at[..., :used].add(g) for g in gradients))


def _recompute(tile: _Tile, w: PreparedWeights, spec: LayerSpec) -> TileRows:
    """Computes a tile's activations again."""
    y = tile.x + spec.residual_scale * linear(tile.attended, w.w_out, w.b_out)
    return TileRows(
        y=y,
        z=tile.z,
        pre=linear(pre_norm(y, w.mlp_norm, spec), w.w_in, w.b_in),
        projected=linear(persistent_source(tile.z, w, spec), w.w_kv, w.b_kv),
        attended=tile.attended,
    )
