"""What the Pallas backward loops leave to XLA: weight gradients, many rows at once.

Rows are [L, ..., width], as in `equations`. Operands of products are in spec.dtype and
accumulate in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import (
    Prepared,
    activate,
    linear,
    norm,
    place_heads,
    pre_norm,
)


class Known(NamedTuple):
    """What the backward loop reads of the forward pass, by position.

    Attributes:
      normed: n'(y), what the MLP reads, [L, ..., D].
      hidden: what w_down reads, [L, ..., F].
      slopes: d hidden / d pre of up or, with a gate, of up then gate, [L, ..., p F].
      unit_y, unit_z: y and z standardised, before the norms' scales.
      factor_y, factor_z: what standardising multiplied by, [L, ...].
      source: what the persistent pair was projected from, [L, ..., D].
      raw_k: keys before the k-norm, [L, ..., K E]; unit_k and factor_k: standardised.
      keys, values: the persistent pairs [L, ..., K E], in spec.dtype.
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


class Sequential(NamedTuple):
    """Cotangents that the loop over positions found, float32 unless said otherwise.

    Attributes:
      y, z: of the two residual sums, [L, ..., D].
      normed_y, normed_z: of what the norms of y and z returned, [L, ..., D].
      pre: of the MLP's first product, in spec.dtype, [L, ..., p F].
      keys, values: of the persistent pairs, [L, ..., K E].
    """

    y: Array
    z: Array
    normed_y: Array
    normed_z: Array
    pre: Array
    keys: Array
    values: Array


def recompute(
    x: Array, z: Array, attended: Array, w: Prepared, spec: LayerSpec
) -> Known:
    """Works out a layer's inner values from its input, output and attended values."""
    y = x + spec.residual_scale * linear(attended, w.w_out, w.b_out)
    normed = pre_norm(y, w.mlp_norm, spec)
    pre = linear(normed, w.w_in, w.b_in)
    gated = w.w_in.shape[-1] != w.w_down.shape[1]
    hidden, back = jax.vjp(lambda pre: activate(pre, spec, gated=gated), pre)
    (slopes,) = back(jnp.ones_like(hidden))
    source, raw_k, keys, values = persistent(z, w, spec)
    kind = spec.norm if spec.normed_persistent else "none"
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
    )


def persistent(z: Array, w: Prepared, spec: LayerSpec):
    """Returns what pairs are projected from, keys before k-norm, keys and values."""
    source = pre_norm(z, w.attention_norm, spec) if spec.normed_persistent else z
    raw_k, values = jnp.split(linear(source, w.w_kv, w.b_kv), 2, axis=-1)
    keys = place_heads(raw_k, w.k_norm, None, spec).reshape(raw_k.shape)
    return source, raw_k, keys.astype(spec.dtype), values.astype(spec.dtype)


def standardise(x: Array, kind: str, eps: float) -> tuple[Array, Array]:
    """Returns a norm's result before its scale, and the factor [L, ...] it used."""
    if kind == "none":
        return x, jnp.ones(x.shape[:-1], x.dtype)
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
    return x * factor[..., None], factor


def sequential_gradients(
    known: Known, attended: Array, found: Sequential, w: Prepared, spec: LayerSpec
) -> Prepared:
    """Returns gradients of the weights that the loop over positions uses; q's are 0."""
    s = spec.residual_scale
    attention_norm = jax.tree.map(jnp.zeros_like, w.attention_norm)
    if spec.normed_persistent:
        attention_norm = of_norm(w.attention_norm, known.unit_z, found.normed_z)
    _, back = jax.vjp(
        lambda raw, k_norm: norm(raw, k_norm, spec.qk_norm, spec.qk_norm_eps),
        *(known.raw_k, w.k_norm),
    )
    raw_k, k_norm = back(found.keys)
    pair = jnp.concatenate([raw_k, found.values], axis=-1)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)
    return zeros._replace(
        w_kv=contract(known.source, pair, spec),
        b_kv=of_bias(w.b_kv, pair),
        w_out=contract(attended, s * found.y, spec),
        b_out=of_bias(w.b_out, s * found.y),
        w_in=contract(known.normed, found.pre, spec),
        b_in=of_bias(w.b_in, found.pre.astype(jnp.float32)),
        w_down=contract(known.hidden, s * found.z, spec),
        b_down=of_bias(w.b_down, s * found.z),
        attention_norm=attention_norm,
        mlp_norm=of_norm(w.mlp_norm, known.unit_y, found.normed_y),
        k_norm=k_norm,
    )


def query_gradients_of(
    x: Array, for_q: Array, for_k: Array, for_v: Array, w: Prepared, spec: LayerSpec
) -> tuple[Array, Prepared]:
    """Maps cotangents of q and temporary pairs to those of x and of the weights."""
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    normed, norm_back = jax.vjp(lambda x, p: pre_norm(x, p, spec), x, w.attention_norm)
    flat = linear(normed, w.w_qkv, w.b_qkv)
    q, k, _ = jnp.split(flat, [H * E, (H + K) * E], axis=-1)
    place = lambda part, p: norm(part, p, spec.qk_norm, spec.qk_norm_eps)  # noqa: E731
    for_q, q_norm = jax.vjp(place, q, w.q_norm)[1](for_q)
    for_k, k_norm = jax.vjp(place, k, w.k_norm)[1](for_k)
    for_flat = jnp.concatenate([for_q, for_k, for_v], axis=-1)
    for_normed = linear(for_flat, w.w_qkv.swapaxes(1, 2))
    for_x, attention_norm = norm_back(for_normed)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)
    return for_x, zeros._replace(
        w_qkv=contract(normed, for_flat, spec),
        b_qkv=of_bias(w.b_qkv, for_flat),
        attention_norm=attention_norm,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def contract(rows: Array, cotangents: Array, spec: LayerSpec) -> Array:
    """Returns rows^T cotangents, [L, N, M] from [L, ..., N] and [L, ..., M]."""
    flat = (
        part.astype(spec.dtype).reshape(part.shape[0], -1, part.shape[-1])
        for part in (rows, cotangents)
    )
    return jnp.einsum("lrn,lrm->lnm", *flat, preferred_element_type=jnp.float32)


def of_bias(bias: Array | None, cotangents: Array) -> Array | None:
    """Returns the gradient of a bias [L, M], None where there is none."""
    if bias is None:
        return None
    return cotangents.reshape(cotangents.shape[0], -1, cotangents.shape[-1]).sum(axis=1)


def of_norm(parameters, unit: Array, cotangents: Array):
    """Returns the gradients of a norm's scale and bias, None where there are none."""
    scale, bias = parameters
    return of_bias(scale, cotangents * unit), of_bias(bias, cotangents)
