"""The backward of a tile on TPU: one kernel runs through its positions in reverse.

Attention across tiles is plain products, left to XLA.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import Prepared
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    COPIES,
    NEAR,
    HeadSums,
    Launch,
    alibi_slopes,
    dot,
    head_indicator,
    launch_kernel,
    resident,
    slopes_row,
)
from pallas_kernels.recurrent_prefill.tiles.backward import (
    Kept,
    Kernels,
    LaterQueries,
    QueryGradients,
)
from pallas_kernels.recurrent_prefill.tiles.gradients import Known, PositionGradients
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors


def mosaic_kernels(launch: Launch) -> Kernels:
    """Returns the parts of the backward loop; attention across tiles is XLA's."""
    return Kernels(
        later_queries_backward=partial(later_queries_backward, launch.spec),
        positions_backward=partial(_positions_back, launch),
        queries_backward=partial(queries_backward, launch.spec),
    )


class TileInputs(NamedTuple):
    """What the kernel reads of a tile and a layer; `rows` of the batch at a time."""

    dk: Array  # [b, rows, H E], float32: what later tiles found of the tile's keys
    dv: Array  # [b, rows, H E]
    k: Array  # [b, rows, H E], the tile's persistent pairs
    v: Array  # [b, rows, H E]
    q: Array  # [b, rows, H E]
    attended: Array  # [b, rows, H E]
    lse: Array  # [b, rows, COPIES H]
    unit_y: Array  # [b, rows, D], y standardised, before the norm's scale
    unit_z: Array  # [b, rows, D]
    unit_k: Array  # [b, rows, H E]
    factor_y: Array  # [b, rows, 1], what standardising multiplied by
    factor_z: Array  # [b, rows, 1]
    factor_k: Array  # [b, rows, 1]
    slopes: Array  # [b, rows, F or 2 F], d hidden / d pre
    dz: Array  # [b, rows, D], from the layer above
    w_out: Array  # [H E, D]
    w_in: Array  # [D, F or 2 F]
    w_down: Array  # [F, D]
    w_kv: Array  # [D, 2 H E]
    mlp_scale: Array  # [1, D]
    attention_scale: Array  # [1, D]
    k_scale: Array  # [1, H E]
    indicator: Array  # see `head_indicator`


class TileOutputs(NamedTuple):
    """What the kernel writes: see `PositionGradients`, and do."""

    dy: Any  # [b, rows, D], float32
    dz: Any  # [b, rows, D]
    dnormed_y: Any  # [b, rows, D]
    dnormed_z: Any  # [b, rows, D]
    dpre: Any  # [b, rows, F or 2 F], in spec.dtype
    dk: Any  # [b, rows, H E], float32
    dv: Any  # [b, rows, H E]
    do: Any  # [b, rows, H E], in spec.dtype


class TileScratch(NamedTuple):
    """VMEM for what later positions have found; cleared for each program."""

    do: Any  # [b, rows, H E], float32
    delta: Any  # [b, rows, COPIES H]


def _positions_back(
    launch: Launch, tile: Kept, w: Prepared, known: Known, q: Array, dk, dv
) -> tuple[PositionGradients, Array]:
    """See `Kernels`; for one layer."""
    spec, rows = launch.spec, launch.tiles.rows
    _, b, B, D = tile.x.shape
    vectors = Vectors.of(w, spec, D)
    lse = tile.lse.swapaxes(2, 3)  # [L, b, B, H]
    factors = (known.factor_y, known.factor_z, known.factor_k)
    factor_y, factor_z, factor_k = (factor[0][..., None] for factor in factors)
    inputs = TileInputs(
        dk=dk[0],
        dv=dv[0],
        k=known.keys[0],
        v=known.values[0],
        q=q[0],
        attended=tile.attended[0],
        lse=jnp.concatenate([lse[0]] * COPIES, axis=-1),
        unit_y=known.unit_y[0],
        unit_z=known.unit_z[0],
        unit_k=known.unit_k[0],
        factor_y=factor_y,
        factor_z=factor_z,
        factor_k=factor_k,
        slopes=known.slopes[0],
        dz=tile.dz[0],
        w_out=w.w_out[0],
        w_in=w.w_in[0],
        w_down=w.w_down[0],
        w_kv=w.w_kv[0],
        mlp_scale=vectors.mlp_norm[0],
        attention_scale=vectors.attention_norm[0],
        k_scale=vectors.k_norm[0],
        indicator=head_indicator(spec),
    )
    of_rows = TileInputs._fields.index("w_out")
    HE, pre_width = q.shape[-1], known.slopes.shape[-1]
    wide = lambda width: jax.ShapeDtypeStruct((b, B, width), jnp.float32)  # noqa: E731
    narrow = lambda width: jax.ShapeDtypeStruct((b, B, width), spec.dtype)  # noqa: E731
    block = lambda width: pl.BlockSpec((b, rows, width), lambda i, _: (0, i, 0))  # noqa: E731
    outputs = TileOutputs(
        *(wide(D), wide(D), wide(D), wide(D)),
        *(narrow(pre_width), wide(HE), wide(HE), narrow(HE)),
    )
    out = launch_kernel(
        launch,
        _positions_back_kernel,
        inputs,
        grid=(B // rows, 1),
        in_specs=[
            *(block(part.shape[-1]) for part in inputs[:of_rows]),
            *(resident(part) for part in inputs[of_rows:]),
        ],
        out_specs=[block(part.shape[-1]) for part in outputs],
        out_shape=outputs,
        scratch_shapes=TileScratch(
            do=pltpu.VMEM((b, rows, HE), jnp.float32),
            delta=pltpu.VMEM((b, rows, COPIES * spec.heads), jnp.float32),
        ),
        spec=spec,
    )
    *found, do = (part[None] for part in out)
    return PositionGradients(*found), do


# A program owns `rows` rows of one tile. The layer's weights stay in VMEM from program
# to program; the tile's queries, pairs and inner values cross HBM once, and so do the
# gradients that it writes.
def _positions_back_kernel(
    inputs: TileInputs, outputs: TileOutputs, scratch: TileScratch, *, spec
):
    b, rows, HE = scratch.do.shape
    s, dtype = spec.residual_scale, inputs.w_out.dtype
    copies = inputs.w_in.shape[1] // inputs.w_down.shape[0]
    heads, lanes = HeadSums(inputs.indicator, spec), inputs.indicator.shape[1]
    slopes = slopes_row(spec, lanes)
    kind_z = spec.norm if spec.normed_persistent else "none"
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    back = partial(dot, transposed=True)

    # A step reads NEAR queries at once, also some that no position has written yet.
    scratch.do[:] = jnp.zeros_like(scratch.do)
    scratch.delta[:] = jnp.zeros_like(scratch.delta)

    def position(i, _):
        t = b - 1 - i

        # 1. dk and dv of position t: what later tiles found, and the tile's own later
        # queries, whose do and delta the steps before have written.
        k, v = wide(inputs.k[t])[None], wide(inputs.v[t])[None]

        def attend_chunk(c, totals):
            dk, dv = totals
            part = pl.ds(c * NEAR, NEAR)
            at = c * NEAR + jax.lax.broadcasted_iota(jnp.int32, (NEAR, rows, lanes), 0)
            q, do = wide(inputs.q[part]), scratch.do[part]
            logits = spec.logit_scale * heads.sums(q * k)
            logits = logits - slopes[None] * (at - t).astype(jnp.float32)
            p = jnp.exp(logits - inputs.lse[part])
            p = jnp.where(at > t, p, 0.0)
            ds = spec.logit_scale * p * (heads.sums(do * v) - scratch.delta[part])
            dk = dk + jnp.sum(heads.repeat(ds) * q, axis=0)
            return dk, dv + jnp.sum(heads.repeat(p) * do, axis=0)

        dk, dv = jax.lax.fori_loop(
            (t + 1) // NEAR, b // NEAR, attend_chunk, (inputs.dk[t], inputs.dv[t])
        )
        outputs.dk[t], outputs.dv[t] = dk, dv

        # 2. Through the k-norm and [W_k W_v] to what the pair was projected from, and
        # through its norm to z.
        draw_k = _standardised_back(
            dk * inputs.k_scale[...], inputs.unit_k[t], inputs.factor_k[t], spec.qk_norm
        )
        dnormed_z = back(draw_k.astype(dtype), inputs.w_kv[:, :HE])
        dnormed_z = dnormed_z + back(dv.astype(dtype), inputs.w_kv[:, HE:])
        outputs.dnormed_z[t] = dnormed_z
        dunit_z = dnormed_z * inputs.attention_scale[...]
        dz = inputs.dz[t] + _standardised_back(
            dunit_z, inputs.unit_z[t], inputs.factor_z[t], kind_z
        )
        outputs.dz[t] = dz

        # 3. Through the MLP and its norm to y. With a gate, up and gate read the same
        # gradient of the hidden rows; their slopes differ.
        dhidden = back((s * dz).astype(dtype), inputs.w_down[...])
        dhidden = jnp.concatenate([dhidden] * copies, axis=1)
        dpre = (dhidden * wide(inputs.slopes[t])).astype(dtype)
        outputs.dpre[t] = dpre
        dnormed_y = back(dpre, inputs.w_in[...])
        outputs.dnormed_y[t] = dnormed_y
        dunit_y = dnormed_y * inputs.mlp_scale[...]
        dy = dz + _standardised_back(
            dunit_y, inputs.unit_y[t], inputs.factor_y[t], spec.norm
        )
        outputs.dy[t] = dy

        # 4. Through W_out to what position t attended to: do and delta, which all
        # earlier positions of the tile will read.
        do = back((s * dy).astype(dtype), inputs.w_out[...]).astype(dtype)
        outputs.do[t], scratch.do[t] = do, wide(do)
        scratch.delta[t] = heads.sums(wide(do) * wide(inputs.attended[t]))

    jax.lax.fori_loop(0, b, position, None)


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


def later_queries_backward(
    spec: LayerSpec,
    keys: Float[Array, "L b B HE"],
    values: Float[Array, "L b B HE"],
    later: LaterQueries,
    first: Int[Array, "L B"],
    at: Int[Array, "L B"],
) -> tuple[Float[Array, "L b B HE"], Float[Array, "L b B HE"]]:
    """See `Kernels`; one product over all queries, those before `first` masked."""
    shape = keys.shape
    k, v = (_heads(part, spec) for part in (keys, values))  # [L, b, B, H, E]
    q, do = (_heads(part, spec) for part in later[:2])  # [L, B, T, H, E]
    query = jnp.arange(q.shape[2])
    key = at[..., None] + jnp.arange(shape[1])  # [L, B, b]
    first = first[..., None]
    logits = _product("lsbhe,lbthe->lbhst", k, q) * spec.logit_scale
    distance = query - key[..., None]
    logits = logits - _slopes(spec) * distance[:, :, None].astype(jnp.float32)
    seen = (key < first)[..., None] & (query >= first)[:, :, None]
    p = jnp.exp(logits - later.lse[:, :, :, None])
    p = jnp.where(seen[:, :, None], p, 0.0)
    ds = p * (_product("lsbhe,lbthe->lbhst", v, do) - later.delta[:, :, :, None])
    ds = (spec.logit_scale * ds).astype(spec.dtype)
    dk = _product("lbhst,lbthe->lsbhe", ds, q)
    dv = _product("lbhst,lbthe->lsbhe", p.astype(spec.dtype), do)
    return dk.reshape(shape), dv.reshape(shape)


def queries_backward(
    spec: LayerSpec,
    queries,
    own_k: Float[Array, "L b B HE"],
    own_v: Float[Array, "L b B HE"],
    keys: Float[Array, "L B S HE"],
    values: Float[Array, "L B S HE"],
    before: Int[Array, "L B"],
) -> QueryGradients:
    """See `Kernels`; one product over all slots, those not seen masked."""
    q, do, attended, lse = queries
    shape, scale = q.shape, spec.logit_scale
    q, do, attended, own_k, own_v = (
        _heads(part, spec) for part in (q, do, attended, own_k, own_v)
    )
    k, v = (_heads(part, spec) for part in (keys, values))  # [L, B, S, H, E]
    lse = jnp.transpose(lse, (0, 3, 2, 1))  # [L, B, H, b]
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    by_head = lambda part: jnp.transpose(part.sum(-1), (0, 2, 3, 1))  # noqa: E731
    by_row = lambda part: jnp.transpose(part, (0, 3, 1, 2))[..., None]  # noqa: E731
    delta = by_head(wide(do) * wide(attended))
    p = jnp.exp(scale * by_head(wide(q) * wide(own_k)) - lse)
    ds = scale * p * (by_head(wide(do) * wide(own_v)) - delta)
    dk_own, dv_own = by_row(ds) * q, by_row(p) * do
    dq = by_row(ds) * own_k
    at, t = jnp.arange(k.shape[2]), jnp.arange(shape[1])
    query = before[..., None] + t  # [L, B, b]
    distance = (query[..., None] - at)[:, :, None]
    logits = scale * _product("ltbhe,lbshe->lbhts", q, k)
    logits = logits - _slopes(spec) * distance.astype(jnp.float32)
    p = jnp.exp(logits - lse[..., None])
    p = jnp.where(distance > 0, p, 0.0)
    ds = scale * p * (_product("ltbhe,lbshe->lbhts", do, v) - delta[..., None])
    dq = dq + _product("lbhts,lbshe->ltbhe", ds.astype(spec.dtype), k)
    rows = (part.reshape(shape) for part in (dq, dk_own, dv_own))
    return QueryGradients(*rows, delta=jnp.transpose(delta, (0, 3, 2, 1)))


def _heads(rows: Array, spec: LayerSpec) -> Array:
    return rows.reshape(*rows.shape[:-1], -1, spec.head_width)


def _slopes(spec: LayerSpec) -> Array:
    """Returns ALiBi's slopes [H, 1, 1]."""
    return alibi_slopes(spec, jnp.arange(spec.heads))[:, None, None]


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
