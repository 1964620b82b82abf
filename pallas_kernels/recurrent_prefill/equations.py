"""The layer's equations on rows of stacked layers, as the XLA path computes them.

Rows are [L, ..., B, D]: any axes between the layers and the batch. Weights are prepared
once a call: heads flattened, products that read the same rows side by side.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.cpu import panels
from pallas_kernels.recurrent_prefill.call import Array, LayerSpec, LayerWeights

HIDDEN = -1e30
"""The logit of a pair that is not seen, or what is added to it.

Finite, so that a query that has read no other pair yet computes no infinity less
infinity. Its own pair is always visible, and next to it such a pair weighs exactly 0.
"""


Rotary = tuple[Float[Array, "... half"], Float[Array, "... half"]]
"""Rotary tables: cos and sin [..., 1, rope_width / 2] at the rows' positions."""
NormParameters = tuple[Float[Array, "L _"] | None, Float[Array, "L _"] | None]
"""Scale and bias of a norm; None where it has none."""


class PreparedWeights(NamedTuple):
    """Weights as the loops read them; matrices in one dtype, vectors as they came."""

    w_qkv: Array  # [L, D, (H + 2 K) E]
    w_kv: Array  # [L, D, 2 K E]
    w_out: Array  # [L, H E, D]
    w_in: Array  # [L, D, F] or, with a gate, [L, D, 2 F]: up, then gate
    w_down: Array  # [L, F, D]
    b_qkv: Array | None
    b_kv: Array | None
    b_out: Array | None
    b_in: Array | None
    b_down: Array | None
    attention_norm: tuple[Array | None, Array | None]
    mlp_norm: tuple[Array | None, Array | None]
    q_norm: tuple[Array | None, Array | None]
    k_norm: tuple[Array | None, Array | None]


def prepare(weights: LayerWeights, dtype) -> PreparedWeights:
    """Lays the weights out, matrices in `dtype`.

    Linear in the weights: the transpose, in a wide dtype, maps gradients back.
    """
    w = weights
    L, D = w.w_q.shape[:2]

    def columns(*parts: Array | None) -> Array:
        flat = [part.reshape(L, D, -1) for part in parts if part is not None]
        return jnp.concatenate(flat, axis=-1).astype(dtype)

    def vector(*parts: tuple[Array | None, Array | None]) -> Array | None:
        # Of biases and the matrices they belong to: one is for all columns or for none.
        if all(bias is None for bias, _ in parts):
            return None
        columns = [
            jnp.zeros((L, part[0, 0].size)) if bias is None else bias.reshape(L, -1)
            for bias, part in parts
            if part is not None
        ]
        return jnp.concatenate(columns, axis=-1)

    return PreparedWeights(
        # One product for queries and temporary pairs, which read the layer's input, and
        # one for the persistent pair, which reads z: the same w_k and w_v twice.
        w_qkv=columns(w.w_q, w.w_k, w.w_v),
        w_kv=columns(w.w_k, w.w_v),
        w_out=w.w_out.reshape(L, -1, D).astype(dtype),
        w_in=columns(w.w_up, w.w_gate),
        w_down=w.w_down.astype(dtype),
        b_qkv=vector((w.b_q, w.w_q), (w.b_k, w.w_k), (w.b_v, w.w_v)),
        b_kv=vector((w.b_k, w.w_k), (w.b_v, w.w_v)),
        b_out=w.b_out,
        b_in=vector((w.b_up, w.w_up), (w.b_gate, w.w_gate)),
        b_down=w.b_down,
        attention_norm=(w.attention_norm_scale, w.attention_norm_bias),
        mlp_norm=(w.mlp_norm_scale, w.mlp_norm_bias),
        q_norm=(w.q_norm_scale, w.q_norm_bias),
        k_norm=(w.k_norm_scale, w.k_norm_bias),
    )


def linear(
    x: Float[Array, "L ... N"],
    weight: Float[Array, "L N M"],
    bias: Float[Array, "L M"] | None = None,
    *,
    narrow: bool = False,
) -> Float[Array, "L ... M"]:
    """Multiplies rows [L, ..., N] by [L, N, M]; accumulates in at least float32.

    Args:
      narrow: has the product in the weight's dtype, in which it then crosses memory,
        accumulated as the device does; what is returned is wide all the same.
    """
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    # Keep axes separate: a sharded batch must not be merged.
    if weight.shape[0] == 1:  # a plain product: batched ones are slower on CPU
        product, weight = "...n,np->...p", weight[0]
    else:
        product = "l...n,lnp->l...p"
    x = x.astype(weight.dtype)
    out = weight.dtype if narrow else wide
    y = jnp.einsum(product, x, weight, preferred_element_type=out).astype(wide)
    return y if bias is None else y + over_rows(bias, y)


class Transposed(NamedTuple):
    """The matrices, transposed once a call."""

    w_qkv: Array
    w_kv: Array
    w_out: Array
    w_in: Array
    w_down: Array


def transpose(w: PreparedWeights) -> Transposed:
    """Transposes the matrices."""
    return Transposed(*(jnp.swapaxes(getattr(w, n), 1, 2) for n in Transposed._fields))


class FewRowsMatrix(NamedTuple):
    """A matrix as a product of a few rows reads it, laid out before the loop.

    Attributes:
      weight: [L, N, M].
      transposed: [L, M, N].
      panels: of the C++ kernel for CPUs, where it serves.
    """

    weight: Array
    transposed: Array
    panels: Array | None


class FewRowsMatrices(NamedTuple):
    """The matrices by which the recurrence multiplies at each position."""

    w_kv: FewRowsMatrix
    w_out: FewRowsMatrix
    w_in: FewRowsMatrix
    w_down: FewRowsMatrix


def few_rows_matrices(
    weights: PreparedWeights | Transposed,
    transposed: PreparedWeights | Transposed,
    *,
    rows: int,
) -> FewRowsMatrices:
    """Lays matrices out for products with `rows` rows.

    Args:
      transposed: the same matrices, [L, M, N].
    """

    def matrix(name: str) -> FewRowsMatrix:
        weight = getattr(weights, name)
        served = panels.serves(weight, rows=rows)
        laid_out = panels.panels_of(weight) if served else None
        return FewRowsMatrix(weight, getattr(transposed, name), laid_out)

    return FewRowsMatrices(*(matrix(name) for name in FewRowsMatrices._fields))


def few_rows_linear(
    x: Float[Array, "L ... N"],
    matrix: FewRowsMatrix,
    bias: Float[Array, "L M"] | None = None,
) -> Float[Array, "L ... M"]:
    """Multiplies rows [L, ..., N] by a matrix [L, N, M], as `linear` does.

    In XLA on CPU the product of 8 rows and a matrix is 1.4x faster with the matrix on
    the left, its rows along the contraction: so the rows are transposed, not the
    matrix. The C++ kernel is three times as fast.
    """
    weight, transposed, laid_out = matrix
    if laid_out is not None:
        rows = x.astype(weight.dtype).reshape(x.shape[0], -1, x.shape[-1])
        y = panels.multiply(rows, laid_out, columns=weight.shape[-1])
        y = y.reshape(*x.shape[:-1], -1)
    elif weight.shape[0] > 1:
        return linear(x, weight, bias)
    else:
        y = jax.lax.platform_dependent(
            x, weight, transposed, cpu=_from_the_left, default=_from_the_right
        )
    return y if bias is None else y + over_rows(bias, y)


def _from_the_right(x: Array, weight: Array, transposed: Array) -> Array:
    return linear(x, weight)


def _from_the_left(x: Array, weight: Array, transposed: Array) -> Array:
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    # The barriers keep XLA from turning the product round again.
    columns = jax.lax.optimization_barrier(jnp.moveaxis(x.astype(weight.dtype), -1, 0))
    y = jnp.einsum("pn,n...->p...", transposed[0], columns, preferred_element_type=wide)
    return jnp.moveaxis(jax.lax.optimization_barrier(y), 0, -1)


def over_rows(
    vector: Float[Array, "L M"], rows: Float[Array, "L ... M"]
) -> Float[Array, "L ... M"]:
    """Gives a vector [L, M] the rank of rows [L, ..., M]."""
    L, M = vector.shape
    return vector.reshape(L, *(1,) * (rows.ndim - 2), M).astype(rows.dtype)


def norm(
    x: Float[Array, "L ... N"],
    parameters: NormParameters,
    kind: str,
    eps: float,
) -> Float[Array, "L ... N"]:
    """Normalises rows over the last axis, then applies scale and bias [L, D]."""
    # "layer" takes the mean off and then does what "rms" does; "none" does neither, but
    # scale and bias still count where they are given.
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    if kind != "none":
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    scale, bias = parameters
    x = x if scale is None else x * over_rows(scale, x)
    return x if bias is None else x + over_rows(bias, x)


def pre_norm(
    x: Float[Array, "L ... D"], parameters: NormParameters, spec: LayerSpec
) -> Float[Array, "L ... D"]:
    """Applies one of the two norms in front of a branch."""
    return norm(x, parameters, spec.norm, spec.norm_eps)


def norm_and_rotate(
    flat: Float[Array, "L ... N"],
    parameters: NormParameters,
    rotary: Rotary | None,
    spec,
) -> Float[Array, "L ... heads E"]:
    """Turns [..., heads E] into qk-normalised, rotated heads [..., heads, E].

    Args:
      rotary: at the rows' positions; None: no RoPE.
    """
    y = norm(flat, parameters, spec.qk_norm, spec.qk_norm_eps)
    y = y.reshape(*flat.shape[:-1], -1, spec.head_width)
    if rotary is None:
        return y
    cos, sin = rotary
    half = spec.rope_width // 2
    # Channel i turns with channel i + half; those after the rotated ones pass.
    a, b, rest = jnp.split(y, [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rotation(positions: Int[Array, "..."], spec: LayerSpec, dtype) -> Rotary | None:
    """Returns cosine and sine [..., 1, rope_width / 2] at positions [...]."""
    if spec.rope_base is None:
        return None
    half = spec.rope_width // 2
    # The tables are made from positions, so a row may stand anywhere.
    theta = spec.rope_base ** (-jnp.arange(half, dtype=dtype) / half)
    angle = positions[..., None, None].astype(dtype) * theta
    return jnp.cos(angle), jnp.sin(angle)


def activate(
    pre: Float[Array, "... F_or_2F"], spec: LayerSpec, *, gated: bool
) -> Float[Array, "... F"]:
    """Applies the MLP's nonlinearity to [..., F] or, gated, to [..., 2 F]."""
    act = ACTIVATIONS[spec.activation]
    if not gated:
        return act(pre)
    # `w_in` has both halves side by side: up, then gate.
    up, gate = jnp.split(pre, 2, axis=-1)
    return act(gate) * up


def activate_in_kernel(
    x: Float[Array, "rows columns"], name: str
) -> Float[Array, "rows columns"]:
    """Applies the nonlinearity in a kernel, to float32: no lowering has an erf."""
    if name == "gelu":
        return 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5)))
    if name == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    if name == "relu_squared":
        positive = jnp.maximum(x, 0.0)
        return positive * positive
    return x * jax.nn.sigmoid(x)


def _erf(x: jax.Array) -> jax.Array:
    """Approximates erf within 1.5e-7: Abramowitz and Stegun, 7.1.26."""
    size = jnp.abs(x)
    u = 1.0 / (1.0 + 0.3275911 * size)
    # A polynomial in u from its last coefficient on, times the exponential.
    series = 1.061405429
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * u + coefficient
    value = 1.0 - series * u * jnp.exp(-size * size)
    return jnp.where(x < 0.0, -value, value)


def persistent_source(
    z: Float[Array, "L ... D"], w: PreparedWeights, spec: LayerSpec
) -> Float[Array, "L ... D"]:
    """Returns what the persistent pair is projected from: norm(z), or z (ablation)."""
    return pre_norm(z, w.attention_norm, spec) if spec.normed_persistent else z
