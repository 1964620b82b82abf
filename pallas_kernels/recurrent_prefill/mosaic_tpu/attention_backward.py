"""Gradients of attention across tiles on TPU: plain products, left to XLA."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import alibi_slopes
from pallas_kernels.recurrent_prefill.tiles.backward import LaterQueries, QueryGradients

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
    documents, own = _documents(segments, at, shape[1])

    def add(c, totals):
        span, query, fresh = _span(c, T)
        q, do = (_heads(span(part, 2), spec) for part in later[:2])  # [L, B, t, H, E]
        lse, delta = (span(part, 3)[:, :, :, None] for part in later[2:])
        logits = _product("lsbhe,lbthe->lbhst", k, q) * spec.logit_scale
        distance = query - key[..., None]
        logits = logits - _slopes(spec) * distance[:, :, None].astype(jnp.float32)
        seen = seen_keys & ((query >= first[..., None]) & fresh)[:, :, None]
        if segments is not None:
            seen = seen & (own[:, :, None] == span(documents, 1)[:, None])
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
    documents, own = _documents(segments, before, b)

    def add(c, dq):
        span, at, fresh = _span(c, S)
        k, v = (_heads(span(part, 2), spec) for part in (keys, values))
        distance = (query - at)[:, :, None]
        logits = scale * _product("ltbhe,lbshe->lbhts", q, k)
        logits = logits - _slopes(spec) * distance.astype(jnp.float32)
        p = jnp.exp(logits - lse[..., None])
        seen = (distance > 0) & fresh
        if segments is not None:
            same = own[:, :, None] == span(documents, 1)[:, None]
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

    The last one begins earlier where the axis is no multiple of SPAN, and overlaps.
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
