"""The backward of a tile on GPU: seven kernels per position, attention across tiles.

Gradients of a tile are [L, b, B, width] and are written in place, slot by slot, so
that the weights' gradients can be formed for the full tile at once. A norm's kernel
reads full rows twice, for the sums and for the result; the k-norm's is spread over
`own_tile_backward` and `pair_product_back`.

Attention rebuilds its probabilities from the log-normalizers. With p_ij = exp(logit_ij
- log_normalizer_i), do_i the gradient of what i attended to and delta_i = do_i .
attended_i:

    ds_ij = p_ij (do_i . v_j - delta_i);  dv_j = sum_i p_ij do_i
    dk_j = scale sum_i ds_ij q_i;         dq_i = scale sum_j ds_ij k_j

Only dk and dv are sequential: a tile's keys first read the queries of all later tiles,
then the step of each position reads the later queries of its own tile.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from pallas_kernels.powers import next_power
from pallas_kernels.recurrent_prefill.call import Array
from pallas_kernels.recurrent_prefill.equations import PreparedWeights, linear
from pallas_kernels.recurrent_prefill.tiles.backward import (
    Kernels,
    Known,
    LaterQueries,
    LayerTape,
    PositionGradients,
    QueryGradients,
)
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors
from pallas_kernels.recurrent_prefill.triton.launch import (
    POSITION,
    Launch,
    cached_head_spec,
    dot,
    head_scalars_spec,
    head_spec,
    launch_kernel,
    like,
    one_slot,
    power_dividing,
    row_spec,
    slope_of,
    slot_of,
    slot_spec,
    vector_spec,
    warps_of,
)


def norm_back(
    launch: Launch,
    t: Int[Array, "1"],
    base: Float[Array, "L _ B D"],
    dn: Float[Array, "L b B D"],
    unit: Float[Array, "L b B D"],
    factor: Float[Array, "L b B"],
    scale: Float[Array, "L D"],
    out: Float[Array, "L b B D"],
    *,
    kind: str,
):
    """Writes out[t] = base[t] + norm back (dn[t]); returns it and s out[t].

    Args:
      unit: normalised rows before the norm's scale, [L, b, B, D].
      factor: what the norm multiplied by, [L, b, B].
    """
    L, b, B, D = out.shape
    block = launch.tiles.attend_rows
    row = lambda array: pl.BlockSpec(  # noqa: E731
        (None, array.shape[1], block, D), lambda l, i: (l, 0, i, 0)
    )
    return launch_kernel(
        launch,
        _norm_back_kernel,
        t,
        base,
        dn,
        unit,
        factor,
        scale,
        out,
        refs=_NormBackRefs,
        grid=(L, B // block),
        in_specs=[
            POSITION,
            row(base),
            row(dn),
            row(unit),
            pl.BlockSpec((None, b, block), lambda l, i: (l, 0, i)),
            pl.BlockSpec((None, D), lambda l, i: (l, 0)),
            row(out),
        ],
        out_specs=[
            row(out),
            pl.BlockSpec((None, 1, block, D), lambda l, i: (l, 0, i, 0)),
        ],
        out_shape=[like(out), jax.ShapeDtypeStruct((L, 1, B, D), launch.spec.dtype)],
        aliases={6: 0},
        reads={1: one_slot(base)} | dict.fromkeys((2, 3, 4), one_slot(out)),
        writes={0: one_slot(out)},
        kind=kind,
        residual_scale=launch.spec.residual_scale,
        depth=power_dividing(D, 1024),
    )


class _NormBackRefs(NamedTuple):
    """References of `_norm_back_kernel`."""

    t: Any  # int32 [1]: the position within the tile
    base: Any  # [b, rows, D]
    dn: Any  # [b, rows, D]: gradient of what the norm returned
    unit: Any  # [b, rows, D]: rows before the norm's scale
    factor: Any  # [b, rows]: what the norm multiplied by
    scale: Any  # [D], of the norm
    before: Any  # the array that `out` is written into; not read
    out: Any  # out, [b, rows, D]
    scaled: Any  # out, [1, rows, D]: s times the new row of out


# A program owns a few full rows, read twice: for the sums and for the result.
def _norm_back_kernel(refs: _NormBackRefs, *, kind, residual_scale, depth):
    t = refs.t[0]
    rows, D = refs.out.shape[1:]

    def add(c, sums):
        part = pl.ds(c * depth, depth)
        g = refs.dn[t, :, part] * refs.scale[part][None, :]
        along, level = sums
        return along + jnp.sum(g * refs.unit[t, :, part], axis=1), level + jnp.sum(
            g, axis=1
        )

    none = jnp.zeros(rows, jnp.float32)
    along, level = jax.lax.fori_loop(0, D // depth, add, (none, none))
    along, level, factor = along / D, level / D, refs.factor[t]

    # With the sums known, the same rows again for the result.
    def write(c, _):
        part = pl.ds(c * depth, depth)
        g = refs.dn[t, :, part] * refs.scale[part][None, :]
        g = _standardised_back(g, refs.unit[t, :, part], factor, along, level, kind)
        total = refs.base[t, :, part] + g
        refs.out[t, :, part] = total
        refs.scaled[0, :, part] = (residual_scale * total).astype(refs.scaled.dtype)
        return 0

    jax.lax.fori_loop(0, D // depth, write, 0)


def _standardised_back(
    g: Float[Array, "rows columns"],
    unit: Float[Array, "rows columns"],
    factor: Float[Array, " rows"],
    along: Float[Array, " rows"],
    level: Float[Array, " rows"],
    kind: str,
) -> Float[Array, "rows columns"]:
    """Maps the gradient of unit rows back through their standardisation."""
    if kind == "none":
        return g
    g = g - unit * along[:, None]
    if kind == "layer":
        g = g - level[:, None]
    return g * factor[:, None]


def transposed_product(
    launch: Launch,
    t: Int[Array, "1"],
    rows: Float[Array, "L _ B M"],
    w: Float[Array, "L N M"],
    out: Float[Array, "L b B N_or_2N"],
    slopes: Float[Array, "L b B N_or_2N"] | None = None,
) -> Float[Array, "L b B N_or_2N"]:
    """Writes out[t] = rows[t] w^T, with w [L, N, M].

    Args:
      slopes: [L, b, B, p N]: out[t] is then p copies of the product side by side, times
        slopes[t].
    """
    L, _, B, width = out.shape
    N, M = w.shape[1:]
    block = launch.tiles.rows
    columns = launch.columns(N, L * (B // block))
    factors = () if slopes is None else (slopes,)
    spec = row_spec(out, block)
    (out,) = launch_kernel(
        launch,
        _transposed_product_kernel,
        t,
        rows,
        w,
        *factors,
        out,
        grid=(L, B // block, N // columns),
        in_specs=[
            POSITION,
            row_spec(rows, block),
            pl.BlockSpec((None, columns, M), lambda l, i, j: (l, j, 0)),
            *(row_spec(part, block) for part in factors),
            spec,
        ],
        out_specs=[spec],
        out_shape=[like(out)],
        aliases={3 + len(factors): 0},
        reads={1: one_slot(rows)}
        | dict.fromkeys(range(3, 3 + len(factors)), one_slot(out)),
        writes={0: one_slot(out)},
        warps=warps_of(block, columns),
        parts=width // N,
        depth=launch.depth(M),
    )
    return out


def pair_product_back(
    launch: Launch,
    t: Int[Array, "1"],
    pair: Float[Array, "L 2 B KE"],
    sums: Float[Array, "L programs 2 B"],
    factor: Float[Array, "L b B"],
    w: Float[Array, "L D KE_and_KE"],
    turned: Float[Array, "L b B D"],
    level: Float[Array, "L D"],
    out: Float[Array, "L b B D"],
) -> Float[Array, "L b B D"]:
    """Writes out[t] = [k-norm back (dk[t]) | dv[t]] [W_k | W_v]^T.

    The k-norm's backward takes off each row its mean along the unit keys (and, of a
    layer norm, its mean): after the product that is a number per row times what W_k
    makes of the unit keys (and of ones), which the full tile has at once.

    Args:
      pair: factor scale dk[t] and dv[t].
      sums: sums of scale dk unit_k and of scale dk by head, [L, programs, 2, B].
      factor: what the k-norm multiplied by, [L, b, B].
      turned: unit_k W_k^T, float32.
      level: sums of W_k over its columns.
    """
    spec, block = launch.spec, launch.tiles.rows
    L, b, B, D = out.shape
    KE = pair.shape[3]
    columns = launch.columns(D, L * (B // block))
    slots = slot_spec(out, block, columns)
    (out,) = launch_kernel(
        launch,
        _pair_product_back_kernel,
        t,
        pair,
        sums,
        factor,
        w,
        turned,
        level,
        out,
        refs=_PairBackRefs,
        grid=(L, B // block, D // columns),
        in_specs=[
            POSITION,
            row_spec(pair, block),
            pl.BlockSpec((None, sums.shape[1], 2, block), lambda l, i, j: (l, 0, 0, i)),
            pl.BlockSpec((None, b, block), lambda l, i, j: (l, 0, i)),
            pl.BlockSpec((None, columns, 2 * KE), lambda l, i, j: (l, j, 0)),
            slot_spec(turned, block, columns),
            vector_spec(columns),
            slots,
        ],
        out_specs=[slots],
        out_shape=[like(out)],
        aliases={7: 0},
        reads=dict.fromkeys((3, 5), one_slot(out)),
        writes={0: one_slot(out)},
        warps=warps_of(block, columns),
        kind=spec.qk_norm,
        heads=spec.key_heads,
        depth=launch.depth(KE),
    )
    return out


# A program owns rows x columns of one layer's product, its accumulator in registers.
def _transposed_product_kernel(t_ref, rows_ref, w_ref, *refs, parts, depth):
    t = t_ref[0]
    at = slot_of(t, rows_ref.shape[0])
    out_ref = refs[-1]
    columns, M = w_ref.shape

    def add(k, total):
        part = pl.ds(k * depth, depth)
        return total + dot(rows_ref[at, :, part], w_ref[:, part].T)

    zero = jnp.zeros((rows_ref.shape[1], columns), jnp.float32)
    total = jax.lax.fori_loop(0, M // depth, add, zero)
    # With a gate the same product goes to both halves, each times its own slopes.
    N = out_ref.shape[2] // parts
    for part in range(parts):
        mine = pl.ds(part * N + pl.program_id(2) * columns, columns)
        value = total
        if len(refs) == 3:
            value = total * refs[0][t, :, mine].astype(jnp.float32)
        out_ref[t, :, mine] = value.astype(out_ref.dtype)


class _PairBackRefs(NamedTuple):
    """References of `_pair_product_back_kernel`."""

    t: Any  # int32 [1]: the position within the tile
    pair: Any  # [2, rows, K E]
    sums: Any  # [programs, 2, rows]: what heads left for the k-norm
    factor: Any  # [b, rows]: what the k-norm multiplied by
    w: Any  # [columns, 2 K E]: w_k, then w_v
    turned: Any  # [b, rows, columns]: w_k of the unit keys
    level: Any  # [columns]: w_k of ones
    before: Any  # the array that `out` is written into; not read
    out: Any  # out, [b, rows, columns]


# As above; the k-norm's backward subtracts its term after the product.
def _pair_product_back_kernel(refs: _PairBackRefs, *, kind, heads, depth):
    t = refs.t[0]
    KE = refs.pair.shape[2]

    def add(k, total):
        part, values = pl.ds(k * depth, depth), pl.ds(KE + k * depth, depth)
        total = total + dot(refs.pair[0, :, part], refs.w[:, part].T)
        return total + dot(refs.pair[1, :, part], refs.w[:, values].T)

    zero = jnp.zeros((refs.pair.shape[1], refs.w.shape[0]), jnp.float32)
    total = jax.lax.fori_loop(0, KE // depth, add, zero)
    if kind != "none":
        # What each head left of the two sums over all keys; the rest of the array, up
        # to a power of two, was never written.
        programs, _, rows = refs.sums.shape
        written = jax.lax.broadcasted_iota(jnp.int32, (programs, rows), 0) < heads
        mean = lambda n: (  # noqa: E731
            jnp.sum(jnp.where(written, refs.sums[:, n, :], 0.0), axis=0) / KE
        )
        factor = refs.factor[t]
        total = total - (factor * mean(0))[:, None] * refs.turned[t]
        if kind == "layer":
            total = total - (factor * mean(1))[:, None] * refs.level[...][None, :]
    refs.out[t] = total


def shape_of_sums(layers: int, heads: int, batch: int) -> tuple[int, ...]:
    """Returns the shape of the two sums a head leaves for the k-norm's backward."""
    return (layers, next_power(heads), 2, batch)


def later_queries_backward(
    launch: Launch,
    keys: Float[Array, "L b B KE"],
    values: Float[Array, "L b B KE"],
    later: LaterQueries,
    first: Int[Array, "L B"],
    at: Int[Array, "L B"],
):
    """Returns dk, dv [L, b, B, K E] of b keys from the queries at `first` and later.

    Args:
      keys, values: [L, b, B, K E].
      first: index of the first query that counts, int32 [L, B], a multiple of the tile.
      at: index of key 0 among the queries' positions, int32 [L, B]; keys at `first` or
        beyond count for nothing.
    """
    spec = launch.spec
    L, b, B, _ = keys.shape
    K, E, T = spec.key_heads, spec.head_width, later.q.shape[2]
    Q = spec.heads // K
    tile = pl.BlockSpec((None, b, None, E), lambda l, r, h: (l, 0, r, h))
    queries = pl.BlockSpec((None, None, T, Q * E), lambda l, r, h: (l, r, 0, h))
    scalars = pl.BlockSpec((None, None, Q, T), lambda l, r, h: (l, r, h, 0))
    scalar = pl.BlockSpec((None, 1), lambda l, r, h: (l, r))
    return launch_kernel(
        launch,
        _later_queries_kernel,
        first,
        at,
        keys,
        values,
        *later,
        refs=LaterQueriesRefs,
        grid=(L, B, K),
        in_specs=[scalar, scalar, tile, tile, queries, queries, scalars, scalars],
        out_specs=[tile, tile],
        out_shape=[jax.ShapeDtypeStruct(keys.shape, jnp.float32)] * 2,
        # Later queries are half of all, over a full call.
        reads=dict.fromkeys((4, 5, 6, 7), 0.5),
        warps=launch.query_warps(),
        stages=2,
        spec=spec,
        chunk=min(launch.tiles.tile, launch.tiles.keys),
    )


def own_tile_backward(
    launch: Launch,
    t: Int[Array, "1"],
    dk: Float[Array, "L b B KE"],
    dv: Float[Array, "L b B KE"],
    pairs: tuple[Float[Array, "L b B KE"], Float[Array, "L b B KE"]],
    queries,
    unit_k: Float[Array, "L b B KE"],
    factor: Float[Array, "L b B"],
    scale: Float[Array, "L KE"],
    delta: Float[Array, "L b H B"],
):
    """Adds to dk[t], dv[t] what the tile's later queries say: a step's first kernel.

    Returns:
      dk, dv; sums of scale dk unit_k and of scale dk by head, [L, programs, 2, B]; what
      the product with the pairs' weights reads, factor scale dk and dv at t in its
      operands' dtype, [L, 2, B, K E]; delta.

    Args:
      dk, dv: float32 [L, b, B, K E], written in place.
      pairs: persistent keys and values [L, b, B, K E].
      queries: q, do, attended [L, b, B, H E] and lse [L, b, H, B].
      unit_k, factor, scale: what the k-norm's backward needs: its output without scale,
        its factor and its scale.
      delta: sums of do attended by head, of the queries behind t + 1; that of t + 1 is
        written in place.
    """
    spec, block = launch.spec, launch.tiles.attend_rows
    L, b, B, KE = dk.shape
    K, E = spec.key_heads, spec.head_width
    Q = spec.heads // K
    heads = lambda width: pl.BlockSpec(  # noqa: E731
        (None, b, block, width), lambda l, i, h: (l, 0, i, h)
    )
    scalar = pl.BlockSpec((None, b, Q, block), lambda l, i, h: (l, 0, h, i))
    sums = jax.ShapeDtypeStruct(shape_of_sums(L, K, B), jnp.float32)
    narrow = jax.ShapeDtypeStruct((L, 2, B, KE), spec.dtype)
    once: dict[int, float] = dict.fromkeys((1, 2, 5, 7, 8, 10, 11), one_slot(dk))
    half: dict[int, float] = dict.fromkeys((3, 4, 6, 12), 0.5)
    return launch_kernel(
        launch,
        _own_tile_kernel,
        t,
        *pairs,
        *queries,
        unit_k,
        factor,
        scale,
        dk,
        dv,
        delta,
        refs=OwnTileRefs,
        grid=(L, B // block, K),
        in_specs=[
            POSITION,
            heads(E),
            heads(E),
            heads(Q * E),
            heads(Q * E),
            heads(Q * E),
            scalar,
            heads(E),
            pl.BlockSpec((None, b, block), lambda l, i, h: (l, 0, i)),
            pl.BlockSpec((None, E), lambda l, i, h: (l, h)),
            heads(E),
            heads(E),
            scalar,
        ],
        out_specs=[
            heads(E),
            heads(E),
            pl.BlockSpec((None, None, 2, block), lambda l, i, h: (l, h, 0, i)),
            pl.BlockSpec((None, 2, block, E), lambda l, i, h: (l, 0, i, h)),
            scalar,
        ],
        out_shape=[like(dk), like(dv), sums, narrow, like(delta)],
        aliases={10: 0, 11: 1, 12: 4},
        # One pair, and the queries after it: half a tile's on average.
        reads=once | half,
        writes=dict.fromkeys((0, 1, 4), one_slot(dk)),
        spec=spec,
    )


class LaterQueriesRefs(NamedTuple):
    """A program's inputs, then outputs: b keys of one row and key head."""

    first: Any  # [1], the first query that counts
    at: Any  # [1], index of key 0 among the queries
    keys: Any  # [b, E]
    values: Any  # [b, E]
    q: Any  # [T, Q E]
    do: Any  # [T, Q E]
    lse: Any  # [Q, T]
    delta: Any  # [Q, T]
    dk: Any  # [b, E]
    dv: Any  # [b, E]


# A program owns b keys of one row and key head; dk and dv stay in registers while the
# later queries stream by once.
def _later_queries_kernel(refs: LaterQueriesRefs, *, spec, chunk):
    b, E = refs.keys.shape
    Q, T = refs.lse.shape
    first, at = refs.first[0], refs.at[0]
    k, v = refs.keys[...], refs.values[...]
    key = at + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)
    first_head = pl.program_id(2) * Q

    def attend_chunk(c, totals):
        part = pl.ds(c * chunk, chunk)
        query = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)

        def attend_head(g, totals):
            dk, dv = totals
            heads = pl.ds(g * E, E)
            q, do = refs.q[part, heads], refs.do[part, heads]
            logits = spec.logit_scale * dot(k, q.T)
            slope = slope_of(spec, first_head + g)
            logits = logits - slope * (query - key).astype(jnp.float32)
            p = jnp.exp(logits - refs.lse[g, part][None, :])
            p = jnp.where((key < first) & (query >= first), p, 0.0)
            ds = p * (dot(v, do.T) - refs.delta[g, part][None, :])
            dv = dv + dot(p.astype(do.dtype), do)
            dk = dk + dot((spec.logit_scale * ds).astype(q.dtype), q)
            return dk, dv

        # A loop that stays one: unrolled, the rows of all heads are read ahead, and in
        # float32 four heads spill.
        return jax.lax.fori_loop(0, Q, attend_head, totals)

    zero = jnp.zeros((b, E), jnp.float32)
    dk, dv = jax.lax.fori_loop(first // chunk, T // chunk, attend_chunk, (zero, zero))
    refs.dk[:], refs.dv[:] = dk, dv


class OwnTileRefs(NamedTuple):
    """A program's inputs, then outputs: `rows` rows of one key head."""

    t: Any  # [1], the position within the tile
    keys: Any  # [b, rows, E]
    values: Any  # [b, rows, E]
    q: Any  # [b, rows, Q E]
    do: Any  # [b, rows, Q E], written for positions after t
    attended: Any  # [b, rows, Q E]
    lse: Any  # [b, Q, rows]
    unit_k: Any  # [b, rows, E], keys before the k-norm's scale
    factor: Any  # [b, rows], of the k-norm
    scale: Any  # [E], of the k-norm
    old_dk: Any  # [b, rows, E], from later tiles, written in place
    old_dv: Any  # [b, rows, E]
    old_delta: Any  # [b, Q, rows], written in place
    dk: Any  # [b, rows, E]
    dv: Any  # [b, rows, E]
    sums: Any  # [2, rows], for the k-norm's backward
    narrow: Any  # [2, rows, E], operands of the next product
    delta: Any  # [b, Q, rows]


# A program owns one key head's pair of a few rows at position t; it reads the tile's
# queries after t once.
def _own_tile_kernel(refs: OwnTileRefs, *, spec):
    t = refs.t[0]
    b, rows, E = refs.keys.shape
    Q = refs.lse.shape[1]
    k, v = refs.keys[t].astype(jnp.float32), refs.values[t].astype(jnp.float32)
    # Only positions after t count, and only they have written their do.
    at = jax.lax.broadcasted_iota(jnp.int32, (b, rows), 0)
    later = at > t
    read = jnp.broadcast_to(later[:, :, None], (b, rows, E))
    # The query after t has its do from the last step and gets its delta here; the
    # tile's last query has no successor.
    behind = jnp.minimum(t + 1, b - 1)

    def load(ref, heads):
        part = pltriton.load(ref.at[:, :, heads], mask=read, other=0.0)
        return part.astype(jnp.float32)

    first_head = pl.program_id(2) * Q

    def attend_head(g, totals):
        dk, dv = totals
        heads = pl.ds(g * E, E)
        slope = slope_of(spec, first_head + g)
        q, do = load(refs.q, heads), load(refs.do, heads)
        newest = refs.do[behind, :, heads].astype(jnp.float32)
        newest = newest * refs.attended[behind, :, heads].astype(jnp.float32)
        newest = jnp.where(t + 1 < b, jnp.sum(newest, axis=1), 0.0)
        refs.delta[behind, g, :] = newest
        delta = jnp.where(at > t + 1, refs.old_delta[:, g, :], newest[None, :])
        logits = spec.logit_scale * jnp.sum(q * k[None], axis=2)
        logits = logits - slope * (at - t).astype(jnp.float32)
        p = jnp.where(later, jnp.exp(logits - refs.lse[:, g, :]), 0.0)
        ds = p * (jnp.sum(do * v[None], axis=2) - delta)
        dv = dv + jnp.sum(p[:, :, None] * do, axis=0)
        dk = dk + spec.logit_scale * jnp.sum(ds[:, :, None] * q, axis=0)
        return dk, dv

    # A loop that stays one, as above.
    dk, dv = jax.lax.fori_loop(0, Q, attend_head, (refs.old_dk[t], refs.old_dv[t]))
    refs.dk[t], refs.dv[t] = dk, dv
    # The k-norm's backward needs two sums over all heads; each leaves its part.
    scaled = dk * refs.scale[...][None, :]
    refs.sums[0, :] = jnp.sum(scaled * refs.unit_k[t], axis=1)
    refs.sums[1, :] = jnp.sum(scaled, axis=1)
    refs.narrow[0] = (scaled * refs.factor[t][:, None]).astype(refs.narrow.dtype)
    refs.narrow[1] = dv.astype(refs.narrow.dtype)


def queries_backward(
    launch: Launch,
    queries,
    own_k: Float[Array, "L b B KE"],
    own_v: Float[Array, "L b B KE"],
    keys: Float[Array, "L B S KE"],
    values: Float[Array, "L B S KE"],
    before: Int[Array, "L B"],
) -> QueryGradients:
    """Returns the gradients of a tile's queries and temporary pairs, float32.

    Args:
      queries: q, do, attended [L, b, B, H E] and lse [L, b, H, B].
      own_k, own_v: temporary pairs [L, b, B, K E].
      keys, values: [L, B, S, K E], filled up to and with the tile.
      before: how many slots come before the tile, int32 [L, B].
    """
    spec = launch.spec
    q = queries[0]
    L, b, B, _ = q.shape
    H, E = spec.heads, spec.head_width
    Q = H // spec.key_heads
    tile, heads = head_spec(b, E), head_spec(b, E, Q)
    prefix, scalar = cached_head_spec(keys, E, Q), head_scalars_spec(b)
    rows = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    out = launch_kernel(
        launch,
        _query_kernel,
        before,
        *queries,
        own_k,
        own_v,
        keys,
        values,
        refs=QueryRefs,
        grid=(L, B, H),
        in_specs=[
            pl.BlockSpec((None, 1), lambda l, r, h: (l, r)),
            tile,
            tile,
            tile,
            scalar,
            heads,
            heads,
            prefix,
            prefix,
        ],
        out_specs=[tile, tile, tile, scalar],
        out_shape=[rows, rows, rows, jax.ShapeDtypeStruct((L, b, H, B), jnp.float32)],
        # As many pairs before them, on average, as behind.
        reads={7: 0.5, 8: 0.5},
        warps=launch.query_warps(),
        stages=2,
        spec=spec,
        chunk=power_dividing(keys.shape[2], launch.tiles.keys),
    )
    return QueryGradients(*out)


class QueryRefs(NamedTuple):
    """A program's inputs, then outputs: the b queries of one row and query head."""

    before: Any  # [1], slots before the tile
    q: Any  # [b, E]
    do: Any  # [b, E]
    attended: Any  # [b, E]
    lse: Any  # [b]
    own_k: Any  # [b, E], temporary pairs
    own_v: Any  # [b, E]
    keys: Any  # [S, E], persistent, filled up to and with the tile
    values: Any  # [S, E]
    dq: Any  # [b, E]
    dk_own: Any  # [b, E]
    dv_own: Any  # [b, E]
    delta: Any  # [b]


# A program owns the b queries of one row and head; dq stays in registers while the
# row's pairs up to the tile's end stream by once.
def _query_kernel(refs: QueryRefs, *, spec, chunk):
    b = refs.q.shape[0]
    before = refs.before[0]
    slope = slope_of(spec, pl.program_id(2))
    scale = spec.logit_scale
    q, do, lse = refs.q[...], refs.do[...], refs.lse[...]
    wide_q, wide_do = q.astype(jnp.float32), do.astype(jnp.float32)
    # 1. delta, and each query's own temporary pair, which no other query reads.
    delta = jnp.sum(wide_do * refs.attended[...].astype(jnp.float32), axis=1)
    own_k = refs.own_k[...].astype(jnp.float32)
    own_v = refs.own_v[...].astype(jnp.float32)
    p = jnp.exp(scale * jnp.sum(wide_q * own_k, axis=1) - lse)
    ds = scale * p * (jnp.sum(wide_do * own_v, axis=1) - delta)
    refs.dk_own[:] = ds[:, None] * wide_q
    refs.dv_own[:] = p[:, None] * wide_do
    refs.delta[:] = delta
    # 2. The persistent pairs before each query, also those of its own tile.
    t = jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)

    def attend_chunk(c, dq):
        part = pl.ds(c * chunk, chunk)
        k, v = refs.keys[part, :], refs.values[part, :]
        at = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
        logits = scale * dot(q, k.T)
        logits = logits - slope * (before + t - at).astype(jnp.float32)
        p = jnp.exp(logits - lse[:, None])
        p = jnp.where(at < before + t, p, 0.0)
        ds = scale * p * (dot(do, v.T) - delta[:, None])
        return dq + dot(ds.astype(k.dtype), k)

    chunks = (before + b + chunk - 1) // chunk
    chunks = jnp.minimum(chunks, refs.keys.shape[0] // chunk)
    refs.dq[:] = jax.lax.fori_loop(0, chunks, attend_chunk, ds[:, None] * own_k)


def triton_kernels(launch: Launch) -> Kernels:
    """Returns the GPU kernels of the backward loop."""
    return Kernels(
        later_queries_backward=partial(later_queries_backward, launch),
        positions_backward=partial(_positions_back, launch),
        queries_backward=partial(queries_backward, launch),
    )


def _positions_back(
    launch: Launch, tile: LayerTape, w: PreparedWeights, known: Known, q: Array, dk, dv
) -> tuple[PositionGradients, Array]:
    """Runs through a tile's positions in reverse; returns their cotangents."""
    spec = launch.spec
    L, b, B, D = tile.x.shape
    vectors = jax.lax.optimization_barrier(Vectors.of(w, spec, D))
    attention_scale, mlp_scale = vectors.attention_norm[0], vectors.mlp_norm[0]
    kind_z = spec.norm if spec.normed_persistent else "none"
    w_k = w.w_kv[..., : w.w_kv.shape[2] // 2]
    turned = linear(known.unit_k, w_k.swapaxes(1, 2))
    level = jnp.sum(w_k.astype(jnp.float32), axis=2)

    def position(i, carry):
        gradients, do, delta = carry
        t = (b - 1 - i).astype(jnp.int32).reshape(1)
        queries = (q, do, tile.attended, tile.lse)
        dk, dv, sums, pair, delta = own_tile_backward(
            launch,
            t,
            gradients.dk,
            gradients.dv,
            (known.keys, known.values),
            queries,
            known.unit_k,
            known.factor_k,
            vectors.k_norm[0],
            delta,
        )
        dnormed_z = pair_product_back(
            launch,
            t,
            pair,
            sums,
            known.factor_k,
            w.w_kv,
            turned,
            level,
            gradients.dnormed_z,
        )
        dz, scaled = norm_back(
            launch,
            t,
            tile.dz,
            dnormed_z,
            known.unit_z,
            known.factor_z,
            attention_scale,
            gradients.dz,
            kind=kind_z,
        )
        dpre = transposed_product(
            launch, t, scaled, w.w_down, gradients.dpre, known.slopes
        )
        dnormed_y = transposed_product(launch, t, dpre, w.w_in, gradients.dnormed_y)
        dy, scaled = norm_back(
            launch,
            t,
            dz,
            dnormed_y,
            known.unit_y,
            known.factor_y,
            mlp_scale,
            gradients.dy,
            kind=spec.norm,
        )
        do = transposed_product(launch, t, scaled, w.w_out, do)
        gradients = PositionGradients(dy, dz, dnormed_y, dnormed_z, dpre, dk, dv)
        return gradients, do, delta

    unwritten = launch.unwritten
    row = lambda: unwritten(tile.x.shape, jnp.float32)  # noqa: E731
    pre = unwritten(known.slopes.shape, spec.dtype)
    carry = (
        PositionGradients(row(), row(), row(), row(), pre, dk, dv),
        unwritten(q.shape, q.dtype),
        unwritten(tile.lse.shape, jnp.float32),
    )
    gradients, do, _ = jax.lax.fori_loop(0, b, position, carry)
    return gradients, do
