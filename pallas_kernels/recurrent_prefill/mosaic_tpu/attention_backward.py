"""Attention's backward across tiles on TPU: plain products, left to XLA."""

import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import slopes_row
from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.tiles.backward import (
    LaterQueries,
    QueryGradients,
)


def meet_later_queries(spec: LayerSpec, keys, values, later: LaterQueries, first, at):
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
    p = jnp.exp(logits - later.log_normalizer[:, :, :, None])
    p = jnp.where(seen[:, :, None], p, 0.0)
    ds = p * (_product("lsbhe,lbthe->lbhst", v, do) - later.delta[:, :, :, None])
    ds = (spec.logit_scale * ds).astype(spec.dtype)
    for_k = _product("lbhst,lbthe->lsbhe", ds, q)
    for_v = _product("lbhst,lbthe->lsbhe", p.astype(spec.dtype), do)
    return for_k.reshape(shape), for_v.reshape(shape)


def query_gradients(spec: LayerSpec, queries, own_k, own_v, keys, values, before):
    """See `Kernels`; one product over all slots, those not seen masked."""
    q, do, attended, log_normalizer = queries
    shape, scale = q.shape, spec.logit_scale
    q, do, attended, own_k, own_v = (
        _heads(part, spec) for part in (q, do, attended, own_k, own_v)
    )
    k, v = (_heads(part, spec) for part in (keys, values))  # [L, B, S, H, E]
    log_normalizer = jnp.transpose(log_normalizer, (0, 3, 2, 1))  # [L, B, H, b]
    wide = lambda part: part.astype(jnp.float32)  # noqa: E731
    by_head = lambda part: jnp.transpose(part.sum(-1), (0, 2, 3, 1))  # noqa: E731
    by_row = lambda part: jnp.transpose(part, (0, 3, 1, 2))[..., None]  # noqa: E731
    delta = by_head(wide(do) * wide(attended))
    p = jnp.exp(scale * by_head(wide(q) * wide(own_k)) - log_normalizer)
    ds = scale * p * (by_head(wide(do) * wide(own_v)) - delta)
    for_own_k, for_own_v = by_row(ds) * q, by_row(p) * do
    for_q = by_row(ds) * own_k
    at, t = jnp.arange(k.shape[2]), jnp.arange(shape[1])
    query = before[..., None] + t  # [L, B, b]
    distance = (query[..., None] - at)[:, :, None]
    logits = scale * _product("ltbhe,lbshe->lbhts", q, k)
    logits = logits - _slopes(spec) * distance.astype(jnp.float32)
    p = jnp.exp(logits - log_normalizer[..., None])
    p = jnp.where(distance > 0, p, 0.0)
    ds = scale * p * (_product("ltbhe,lbshe->lbhts", do, v) - delta[..., None])
    for_q = for_q + _product("lbhts,lbshe->ltbhe", ds.astype(spec.dtype), k)
    rows = (part.reshape(shape) for part in (for_q, for_own_k, for_own_v))
    return QueryGradients(*rows, delta=jnp.transpose(delta, (0, 3, 2, 1)))


def _heads(rows: Array, spec: LayerSpec) -> Array:
    return rows.reshape(*rows.shape[:-1], -1, spec.head_width)


def _slopes(spec: LayerSpec) -> Array:
    """Returns ALiBi's slopes [H, 1, 1]."""
    return slopes_row(spec)[0][:, None, None]


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
