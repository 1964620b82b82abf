"""What the Pallas backward loops leave to XLA: weight gradients, many rows at once.

Rows are [L, ..., width], as in `equations`. Operands of products are in spec.dtype and
accumulate in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import (
    NormParameters,
    Prepared,
    Rotary,
    activate,
    linear,
    norm,
    norm_and_rotate,
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
      dy, dz: of the two residual sums, [L, ..., D].
      dnormed_y, dnormed_z: of what the norms of y and z returned, [L, ..., D].
      dpre: of the MLP's first product, in spec.dtype, [L, ..., p F].
      dk, dv: of the persistent pairs, keys before rotation, [L, ..., K E].
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
    w: Prepared,
    spec: LayerSpec,
    rotary: Rotary | None,
) -> Known:
    """Works out a layer's inner values from its input, output and attended values."""
    # The forward pass kept a layer's output and what it attended; all between follows
    # from them and the input, for a whole tile in a few large products.
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
    z: Float[Array, "L T B D"], w: Prepared, spec: LayerSpec, rotary: Rotary | None
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
    found: PositionGradients,
    w: Prepared,
    spec: LayerSpec,
) -> Prepared:
    """Returns gradients of the weights that the loop over positions uses; q's are 0."""
    s = spec.residual_scale
    attention_norm = jax.tree.map(jnp.zeros_like, w.attention_norm)
    if spec.normed_persistent:
        attention_norm = norm_gradients(w.attention_norm, known.unit_z, found.dnormed_z)
    _, back = jax.vjp(
        lambda raw, k_norm: norm(raw, k_norm, spec.qk_norm, spec.qk_norm_eps),
        *(known.raw_k, w.k_norm),
    )
    raw_k, k_norm = back(found.dk)
    pair = jnp.concatenate([raw_k, found.dv], axis=-1)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)
    return zeros._replace(
        w_kv=contract(known.source, pair, spec),
        b_kv=bias_gradient(w.b_kv, pair),
        w_out=contract(attended, s * found.dy, spec),
        b_out=bias_gradient(w.b_out, s * found.dy),
        w_in=contract(known.normed, found.dpre, spec),
        b_in=bias_gradient(w.b_in, found.dpre.astype(jnp.float32)),
        w_down=contract(known.hidden, s * found.dz, spec),
        b_down=bias_gradient(w.b_down, s * found.dz),
        attention_norm=attention_norm,
        mlp_norm=norm_gradients(w.mlp_norm, known.unit_y, found.dnormed_y),
        k_norm=k_norm,
    )


def projections_backward(
    x: Float[Array, "L b B D"],
    dq: Float[Array, "L b B HE"],
    dk: Float[Array, "L b B KE"],
    dv: Float[Array, "L b B KE"],
    w: Prepared,
    spec: LayerSpec,
    rotary: Rotary | None,
) -> tuple[Float[Array, "L b B D"], Prepared]:
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
