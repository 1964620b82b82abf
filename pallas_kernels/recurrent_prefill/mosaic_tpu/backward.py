"""The backward of a tile on TPU: one kernel runs through its positions in reverse.

Gradients of attention across tiles are plain products, left to XLA.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import PreparedWeights
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    COPIES,
    NEAR,
    OWN_ROWS,
    HeadSums,
    Launch,
    alibi_slopes,
    block_of_columns,
    block_of_rows,
    dot,
    head_indicator,
    launch_kernel,
    resident,
    rotary_tables,
    rotate,
    slopes_row,
)
from pallas_kernels.recurrent_prefill.tiles.backward import (
    Kernels,
    Known,
    LaterQueries,
    LayerTape,
    PositionGradients,
    QueryGradients,
)
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors

SPAN = 128
"""Queries or slots that attention between tiles takes at once."""


def later_queries_backward(
    spec: LayerSpec,
    keys: Float[Array, "L b B HE"],
    values: Float[Array, "L b B HE"],
    later: LaterQueries,
    first: Int[Array, "L B"],
    at: Int[Array, "L B"],
    *,
    segments: Int[Array, "T B"] | None,
) -> tuple[Float[Array, "L b B HE"], Float[Array, "L b B HE"]]:
    """See `Kernels`; a loop over SPAN queries at a time, from the least `first` on."""
    shape = keys.shape
    k, v = (_heads(part, spec) for part in (keys, values))  # [L, b, B, H, E]
    T = later.q.shape[2]
    key = at[..., None] + jnp.arange(shape[1])  # [L, B, b]
    seen_keys = (key < first[..., None])[..., None]
    documents, document = _documents(segments, at, shape[1])

    def add(c, totals):
        span, query, fresh = _span(c, T)
        q, do = (_heads(span(part, 2), spec) for part in later[:2])  # [L, B, t, H, E]
        lse, delta = (span(part, 3)[:, :, :, None] for part in later[2:])
        logits = _product("lsbhe,lbthe->lbhst", k, q) * spec.logit_scale
        distance = query - key[..., None]
        logits = logits - _slopes(spec) * distance[:, :, None].astype(jnp.float32)
        seen = seen_keys & ((query >= first[..., None]) & fresh)[:, :, None]
        if segments is not None:
            seen = seen & (document[:, :, None] == span(documents, 1)[:, None])
        p = jnp.where(seen[:, :, None], jnp.exp(logits - lse), 0.0)
        ds = p * (_product("lsbhe,lbthe->lbhst", v, do) - delta)
        ds = (spec.logit_scale * ds).astype(spec.dtype)
        dk = _product("lbhst,lbthe->lsbhe", ds, q)
        dv = _product("lbhst,lbthe->lsbhe", p.astype(spec.dtype), do)
        return totals[0] + dk.reshape(shape), totals[1] + dv.reshape(shape)

    zeros = jnp.zeros(shape, jnp.float32)
    spans = jnp.min(first) // SPAN, -(-T // SPAN)
    return jax.lax.fori_loop(*spans, add, (zeros, zeros))


def queries_backward(
    spec: LayerSpec,
    queries,
    own_k: Float[Array, "L b B HE"],
    own_v: Float[Array, "L b B HE"],
    keys: Float[Array, "L B S HE"],
    values: Float[Array, "L B S HE"],
    before: Int[Array, "L B"],
    *,
    segments: Int[Array, "T B"] | None,
) -> QueryGradients:
    """See `Kernels`; a loop over SPAN slots at a time, up to the last row's tile."""
    q, do, attended, lse = queries
    shape, scale = q.shape, spec.logit_scale
    q, do, attended, own_k, own_v = (
        _heads(part, spec) for part in (q, do, attended, own_k, own_v)
    )
    lse = jnp.transpose(lse, (0, 3, 2, 1))  # [L, B, H, b]
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    by_head = lambda part: jnp.transpose(part.sum(-1), (0, 2, 3, 1))  # noqa: E731
    by_row = lambda part: jnp.transpose(part, (0, 3, 1, 2))[..., None]  # noqa: E731
    delta = by_head(wide(do) * wide(attended))
    p = jnp.exp(scale * by_head(wide(q) * wide(own_k)) - lse)
    ds = scale * p * (by_head(wide(do) * wide(own_v)) - delta)
    dk_own, dv_own = by_row(ds) * q, by_row(p) * do
    S, b = keys.shape[2], shape[1]
    query = (before[..., None] + jnp.arange(b))[..., None]  # [L, B, b, 1]
    documents, document = _documents(segments, before, b)

    def add(c, dq):
        span, at, fresh = _span(c, S)
        k, v = (_heads(span(part, 2), spec) for part in (keys, values))
        distance = (query - at)[:, :, None]
        logits = scale * _product("ltbhe,lbshe->lbhts", q, k)
        logits = logits - _slopes(spec) * distance.astype(jnp.float32)
        p = jnp.exp(logits - lse[..., None])
        seen = (distance > 0) & fresh
        if segments is not None:
            same = document[:, :, None] == span(documents, 1)[:, None]
            seen = seen & same[:, None]
        p = jnp.where(seen, p, 0.0)
        ds = scale * p * (_product("ltbhe,lbshe->lbhts", do, v) - delta[..., None])
        return dq + _product("lbhts,lbshe->ltbhe", ds.astype(spec.dtype), k)

    spans = (jnp.max(before) + b + SPAN - 1) // SPAN
    dq = jax.lax.fori_loop(0, spans, add, wide(by_row(ds) * own_k))
    rows = (part.reshape(shape) for part in (dq, dk_own, dv_own))
    return QueryGradients(*rows, delta=jnp.transpose(delta, (0, 3, 2, 1)))


def _span(c: Array, length: int):
    """Returns the c-th SPAN of an axis: how to cut it, its indices, which are new.

    The last one begins earlier where the axis is not a multiple of SPAN, and overlaps.
    """
    width = min(SPAN, length)
    begin = jnp.minimum(c * SPAN, length - width)
    index = begin + jnp.arange(width)

    def cut(part: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(part, begin, width, axis=axis)

    return cut, index, index >= c * SPAN


def _documents(
    segments: Int[Array, "T B"] | None, first: Int[Array, "L B"], b: int
) -> tuple[Any, Any]:
    """Returns documents by row [B, T], and of b positions from `first` on, [B, b].

    Where rows have several, all rows stand at the same position.
    """
    if segments is None:
        return None, None
    by_row = segments.T
    return by_row, jax.lax.dynamic_slice_in_dim(by_row, first[0, 0], b, axis=1)


def _heads(rows: Array, spec: LayerSpec) -> Array:
    return rows.reshape(*rows.shape[:-1], -1, spec.head_width)


def _slopes(spec: LayerSpec) -> Array:
    """Returns ALiBi's slopes [H, 1, 1]."""
    return alibi_slopes(spec, jnp.arange(spec.heads))[:, None, None]


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def mosaic_kernels(launch: Launch, segments: Int[Array, "T B"] | None) -> Kernels:
    """Returns the parts of the backward loop; attention across tiles is XLA's.

    Args:
      segments: documents, T full tiles and B full programs; None: one per row. With
        segments, position 0 is the call's first.
    """
    return Kernels(
        later_queries_backward=partial(
            later_queries_backward, launch.spec, segments=segments
        ),
        positions_backward=partial(_positions_back, launch),
        queries_backward=partial(queries_backward, launch.spec, segments=segments),
    )


class TileInputs(NamedTuple):
    """The kernel's inputs for a tile of a layer, `rows` rows of the batch at a time."""

    segments: Any  # int32 [b, rows, 1], documents, or None
    q: Array  # [b, rows, H E]
    lse: Array  # [b, rows, COPIES H]
    dk: Array  # [rows, H E], float32: what later tiles found of the position's key
    dv: Array  # [rows, H E]
    k: Array  # [rows, H E], the position's persistent pair
    v: Array  # [rows, H E]
    attended: Array  # [rows, H E]
    unit_y: Array  # [rows, D], y standardised, before the norm's scale
    unit_z: Array  # [rows, D]
    unit_k: Array  # [rows, H E]
    factor_y: Array  # [rows, 1], what standardising multiplied by
    factor_z: Array  # [rows, 1]
    factor_k: Array  # [rows, 1]
    slopes: Array  # [rows, F or 2 F], d hidden / d pre
    dz: Array  # [rows, D], from the layer above
    rotary: Any  # `rotary_tables` of the position, each [rows or 1, H E], or None
    w_out: Array  # [H E, D]
    w_in: Array  # [D, F or 2 F]
    w_down: Array  # [F, D]
    w_kv: Array  # [D, 2 H E]
    mlp_scale: Array  # [1, D]
    attention_scale: Array  # [1, D]
    k_scale: Array  # [1, H E]
    indicator: Array  # see `head_indicator`


class TileOutputs(NamedTuple):
    """The kernel's outputs for a position: see `PositionGradients`, and do."""

    dy: Any  # [rows, D], float32
    dz: Any  # [rows, D]
    dnormed_y: Any  # [rows, D]
    dnormed_z: Any  # [rows, D]
    dpre: Any  # [rows, F or 2 F], in spec.dtype
    dk: Any  # [rows, H E], float32
    dv: Any  # [rows, H E]
    do: Any  # [rows, H E], in spec.dtype


class TileScratch(NamedTuple):
    """VMEM for what later positions of the tile have found."""

    do: Any  # [b, rows, H E], in spec.dtype
    delta: Any  # [b, rows, COPIES H]


def _positions_back(
    launch: Launch, tile: LayerTape, w: PreparedWeights, known: Known, q: Array, dk, dv
) -> tuple[PositionGradients, Array]:
    """See `Kernels`; for one layer."""
    spec, rows = launch.spec, launch.tiles.rows
    _, b, B, D = tile.x.shape
    vectors = Vectors.of(w, spec, D)
    lse = tile.lse.swapaxes(2, 3)  # [L, b, B, H]
    factors = (known.factor_y, known.factor_z, known.factor_k)
    factor_y, factor_z, factor_k = (factor[0][..., None] for factor in factors)
    inputs = TileInputs(
        segments=None if tile.segments is None else tile.segments[0][..., None],
        q=q[0],
        lse=jnp.concatenate([lse[0]] * COPIES, axis=-1),
        dk=dk[0],
        dv=dv[0],
        k=known.keys[0],
        v=known.values[0],
        attended=tile.attended[0],
        unit_y=known.unit_y[0],
        unit_z=known.unit_z[0],
        unit_k=known.unit_k[0],
        factor_y=factor_y,
        factor_z=factor_z,
        factor_k=factor_k,
        slopes=known.slopes[0],
        dz=tile.dz[0],
        rotary=rotary_tables(jax.tree.map(lambda part: part[0], known.rotary), spec),
        w_out=w.w_out[0],
        w_in=w.w_in[0],
        w_down=w.w_down[0],
        w_kv=w.w_kv[0],
        mlp_scale=vectors.mlp_norm[0],
        attention_scale=vectors.attention_norm[0],
        k_scale=vectors.k_norm[0],
        indicator=head_indicator(spec),
    )
    of_tile, of_position = (TileInputs._fields.index(name) for name in ("dk", "w_out"))
    HE, pre_width = q.shape[-1], known.slopes.shape[-1]
    wide = lambda width: jax.ShapeDtypeStruct((b, B, width), jnp.float32)  # noqa: E731
    narrow = lambda width: jax.ShapeDtypeStruct((b, B, width), spec.dtype)  # noqa: E731
    tiles_of = lambda width: pl.BlockSpec((b, rows, width), lambda i, _: (0, i, 0))  # noqa: E731

    def position(part) -> pl.BlockSpec:
        """Returns a position's rows, the last one first, or one row for all of them."""
        shared = part.shape[1] == 1 < B
        return pl.BlockSpec(
            (None, 1 if shared else rows, part.shape[-1]),
            lambda i, s: (b - 1 - s, 0 if shared else i, 0),
        )

    outputs = TileOutputs(
        wide(D),
        wide(D),
        wide(D),
        wide(D),
        narrow(pre_width),
        wide(HE),
        wide(HE),
        narrow(HE),
    )
    out = launch_kernel(
        launch,
        _positions_back_kernel,
        inputs,
        grid=(B // rows, b),
        in_specs=[
            *(tiles_of(part.shape[-1]) for part in jax.tree.leaves(inputs[:of_tile])),
            *(position(part) for part in jax.tree.leaves(inputs[of_tile:of_position])),
            *(resident(part) for part in inputs[of_position:]),
        ],
        out_specs=[position(part) for part in outputs],
        out_shape=outputs,
        scratch_shapes=TileScratch(
            do=pltpu.VMEM((b, rows, HE), jnp.dtype(spec.dtype)),
            delta=pltpu.VMEM((b, rows, COPIES * spec.heads), jnp.float32),
        ),
        spec=spec,
    )
    *gradients, do = (part[None] for part in out)
    return PositionGradients(*gradients), do


# A grid step is one position of `rows` rows, a tile's last one first. The layer's
# weights stay in VMEM from row tile to row tile, a tile's queries and what is found of
# them from position to position; all else crosses HBM once.
def _positions_back_kernel(
    inputs: TileInputs, outputs: TileOutputs, scratch: TileScratch, *, spec
):
    b, rows, HE = scratch.do.shape
    s, dtype = spec.residual_scale, inputs.w_out.dtype
    t = b - 1 - pl.program_id(1)
    kind_z = spec.norm if spec.normed_persistent else "none"
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    back = partial(dot, transposed=True)

    # A step reads NEAR queries at once, also some that no position has written yet.
    @pl.when(t == b - 1)
    def _():
        scratch.do[:] = jnp.zeros_like(scratch.do)
        scratch.delta[:] = jnp.zeros_like(scratch.delta)

    # 1. dk and dv of position t: what later tiles found, and the tile's own later
    # queries, whose do and delta the steps before have written.
    few = block_of_rows(rows, OWN_ROWS)

    def own_tile(i, _):
        _later_in_tile(inputs, outputs, scratch, pl.ds(i * few, few), t, spec)

    jax.lax.fori_loop(0, rows // few, own_tile, None)
    dk, dv = outputs.dk[...], outputs.dv[...]
    if inputs.rotary is not None:
        cos, sin = inputs.rotary
        outputs.dk[:] = dk = rotate(dk, cos[...], -sin[...], spec)

    # 2. Through the k-norm and [W_k W_v] to what the pair was projected from, and
    # through its norm to z.
    draw_k = _standardised_back(
        dk * inputs.k_scale[...], inputs.unit_k[...], inputs.factor_k[...], spec.qk_norm
    )
    dnormed_z = back(draw_k.astype(dtype), inputs.w_kv[:, :HE])
    dnormed_z = dnormed_z + back(dv.astype(dtype), inputs.w_kv[:, HE:])
    outputs.dnormed_z[:] = dnormed_z
    dunit_z = dnormed_z * inputs.attention_scale[...]
    dz = inputs.dz[...] + _standardised_back(
        dunit_z, inputs.unit_z[...], inputs.factor_z[...], kind_z
    )
    outputs.dz[:] = dz

    # 3. Through the MLP and its norm to y.
    dnormed_y = _mlp_back((s * dz).astype(dtype), inputs, outputs)
    outputs.dnormed_y[:] = dnormed_y
    dunit_y = dnormed_y * inputs.mlp_scale[...]
    dy = dz + _standardised_back(
        dunit_y, inputs.unit_y[...], inputs.factor_y[...], spec.norm
    )
    outputs.dy[:] = dy

    # 4. Through W_out to what position t attended to: do and delta, which all earlier
    # positions of the tile will read.
    do = back((s * dy).astype(dtype), inputs.w_out[...]).astype(dtype)
    outputs.do[:] = scratch.do[t] = do
    heads = HeadSums(inputs.indicator, spec)
    scratch.delta[t] = heads.sums(wide(do) * wide(inputs.attended[...]))


def _later_in_tile(inputs, outputs, scratch: TileScratch, block, t, spec: LayerSpec):
    """Adds the tile's queries after t to dk and dv of t: a block of rows."""
    b, few = scratch.do.shape[0], block.size
    heads, lanes = HeadSums(inputs.indicator, spec), inputs.indicator.shape[1]
    slopes = slopes_row(spec, lanes)
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    k, v = wide(inputs.k[block])[None], wide(inputs.v[block])[None]

    def attend_chunk(c, totals):
        dk, dv = totals
        part = pl.ds(c * NEAR, NEAR)
        at = c * NEAR + jax.lax.broadcasted_iota(jnp.int32, (NEAR, few, lanes), 0)
        q, do = wide(inputs.q[part, block]), wide(scratch.do[part, block])
        logits, dp = jnp.split(heads.sums(jnp.concatenate([q * k, do * v])), 2)
        logits = spec.logit_scale * logits
        logits = logits - slopes[None] * (at - t).astype(jnp.float32)
        p = jnp.exp(logits - inputs.lse[part, block])
        seen = at > t
        if inputs.segments is not None:
            mine = inputs.segments[t, block]
            seen = seen & (inputs.segments[part, block] == mine[None])
        p = jnp.where(seen, p, 0.0)
        ds = spec.logit_scale * p * (dp - scratch.delta[part, block])
        ds, p = jnp.split(heads.repeat(jnp.concatenate([ds, p])), 2)
        return dk + jnp.sum(ds * q, axis=0), dv + jnp.sum(p * do, axis=0)

    outputs.dk[block], outputs.dv[block] = jax.lax.fori_loop(
        (t + 1) // NEAR, b // NEAR, attend_chunk, (inputs.dk[block], inputs.dv[block])
    )


def _mlp_back(dz: Float[Array, "rows D"], inputs: TileInputs, outputs: TileOutputs):
    """Propagates dz back through the MLP, a block of its inner columns at a time."""
    F, pre_width = inputs.w_down.shape[0], inputs.w_in.shape[1]
    width = block_of_columns(F)
    dnormed = jnp.zeros(outputs.dnormed_y.shape, jnp.float32)
    for first in range(0, F, width):
        dhidden = dot(dz, inputs.w_down[pl.ds(first, width), :], transposed=True)
        # With a gate, up and gate read the same gradient of the hidden rows; their
        # slopes differ.
        for copy in range(0, pre_width, F):
            columns = pl.ds(copy + first, width)
            dpre = dhidden * inputs.slopes[:, columns].astype(jnp.float32)
            dpre = dpre.astype(dz.dtype)
            outputs.dpre[:, columns] = dpre
            dnormed = dnormed + dot(dpre, inputs.w_in[:, columns], transposed=True)
    return dnormed


def _standardised_back(g, unit, factor, kind):
    """Maps the gradient of unit rows back through their standardisation."""
    if kind == "none":
        return g
    g = (
        g
        - unit * jnp.mean(g * unit, axis=-1, keepdims=True)
        - (jnp.mean(g, axis=-1, keepdims=True) if kind == "layer" else 0.0)
    )
    return g * factor
