"""The definition of the layer, position by position; for tests, docs and benches.

With n and n' the pre-norms of the two branches, qknorm over all heads together, s the
residual scale, r the logits' scale and b_ij = -slope_h (i - j) (ALiBi), for positions
i = 0, 1, ... of one layer:

    q_i  = qknorm(W_q n(x_i))
    kt_i = qknorm(W_k n(x_i)),  vt_i = W_v n(x_i)       temporary: for i itself only
    a_i  = W_out softmax_j([r q_i k_j + b_ij for j < i, r q_i kt_i]) [v_j ..., vt_i]
    y_i  = x_i + s a_i;   z_i = y_i + s MLP(n'(y_i))
    k_i  = qknorm(W_k n(z_i)),  v_i = W_v n(z_i)        persistent: the same weights

Source: the Recurrent Transformer paper, section 3.2. Queries and keys are rotated after
qknorm where the layer has RoPE. Which pairs the blocked recurrence sees is said in
`LayerSpec.block`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec, LayerWeights


def recurrent_prefill_reference(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    *,
    spec: LayerSpec,
    segments: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Returns z of L layers from position 0, in at least float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, weights = jax.tree.map(lambda leaf: leaf.astype(dtype), (x, weights))
    document = jnp.zeros(x.shape[:2]) if segments is None else segments
    for layer in range(weights.w_q.shape[0]):
        w = jax.tree.map(lambda leaf, layer=layer: leaf[layer], weights)
        x = _layer(x, w, document, spec)
    return x


def _layer(x, w, document, spec):
    at, H = jnp.arange(x.shape[1]), spec.heads  # positions
    m = spec.alibi_max_bias
    slopes = jnp.zeros(H) if m is None else 2.0 ** (-m * jnp.arange(1, H + 1) / H)
    normed = norm(x, w.attention_norm_scale, w.attention_norm_bias, spec, "norm")
    q = heads(normed, w.w_q, w.b_q, w.q_norm_scale, w.q_norm_bias, at, spec)
    temporary = pair(normed, w, at, spec)

    def position(persistent, i):
        # Temporary pairs of i's own block (of i alone at block 1), persistent before.
        same_block = (at // spec.block == i // spec.block)[:, None, None]
        pairs = [
            jnp.where(same_block, *both)
            for both in zip(temporary, persistent, strict=True)
        ]
        k, v = (jnp.repeat(part, H // spec.key_heads, axis=2) for part in pairs)
        logits = spec.logit_scale * jnp.einsum("bhe,bshe->bhs", q[:, i], k)
        logits -= (slopes[:, None] * jnp.abs(i - at)).astype(x.dtype)
        seen = (at <= i) & (document == document[:, i, None])
        p = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)
        a = jnp.einsum("bhs,bshe,hed->bd", p, v, w.w_out)
        y = x[:, i] + spec.residual_scale * (a if w.b_out is None else a + w.b_out)
        normed = norm(y, w.mlp_norm_scale, w.mlp_norm_bias, spec, "norm")
        z = y + spec.residual_scale * mlp(normed, w, spec.activation)
        source = z
        if spec.normed_persistent:
            source = norm(
                z, w.attention_norm_scale, w.attention_norm_bias, spec, "norm"
            )
        new = pair(source[:, None], w, i[None], spec)
        pairs = [
            old.at[:, i].set(n[:, 0]) for old, n in zip(persistent, new, strict=True)
        ]
        return pairs, z

    _, z = jax.lax.scan(position, [jnp.zeros_like(part) for part in temporary], at)
    return z.swapaxes(0, 1)


def pair(n, w, at, spec):
    """Returns the keys and values that rows n [B, T, D] at positions `at` give."""
    v = jnp.einsum("btd,dke->btke", n, w.w_v)
    k = heads(n, w.w_k, w.b_k, w.k_norm_scale, w.k_norm_bias, at, spec)
    return k, v if w.b_v is None else v + w.b_v


def heads(n, weight, bias, scale, shift, at, spec):
    """Projects n [B, T, D] into heads, qk-normalised over all of them and rotated."""
    y = jnp.einsum("btd,dhe->bthe", n, weight)
    y = y if bias is None else y + bias
    flat = y.reshape(*y.shape[:2], -1)
    y = norm(flat, scale, shift, spec, "qk_norm").reshape(y.shape)
    if spec.rope_base is None:
        return y
    half = spec.rope_width // 2
    angle = at[:, None] * spec.rope_base ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None].astype(y.dtype) for f in (jnp.cos, jnp.sin))
    a, b, rest = jnp.split(y, [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def norm(y, scale, bias, spec, name):
    """RMSNorm, LayerNorm or nothing over the last axis, then scale and bias."""
    kind, eps = getattr(spec, name), getattr(spec, f"{name}_eps")
    if kind != "none":
        y = y - y.mean(-1, keepdims=True) if kind == "layer" else y
        y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def mlp(n, w, activation):
    """act(n W_up) W_down, or (act(n W_gate) * (n W_up)) W_down."""
    act = {
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu_squared": lambda u: jnp.square(jax.nn.relu(u)),
        "silu": jax.nn.silu,
    }[activation]
    h = _linear(n, w.w_up, w.b_up)
    h = act(h) if w.w_gate is None else act(_linear(n, w.w_gate, w.b_gate)) * h
    return _linear(h, w.w_down, w.b_down)


def _linear(n, weight, bias):
    return n @ weight if bias is None else n @ weight + bias
