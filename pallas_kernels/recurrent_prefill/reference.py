"""The definition, position by position over the whole prefix; for tests and docs."""

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.reference_parts import heads, mlp, norm, pair


def recurrent_prefill_reference(x, weights, *, spec, segments=None):
    """Returns z of L layers on x [B, T, D] from position 0, in at least float32.

    Source: the Recurrent Transformer paper, section 3.2; which pairs the blocked
    recurrence sees is said in `LayerSpec.block`.
    """
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
        own = (at // spec.block == i // spec.block)[:, None, None]
        pairs = [
            jnp.where(own, *both) for both in zip(temporary, persistent, strict=True)
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
        kept = [
            old.at[:, i].set(n[:, 0]) for old, n in zip(persistent, new, strict=True)
        ]
        return kept, z

    _, z = jax.lax.scan(position, [jnp.zeros_like(part) for part in temporary], at)
    return z.swapaxes(0, 1)
