"""Softmax attention of arrays: grouped-query, windowed, biased, capped."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from pallas_kernels import few_queries, reductions
from recurjax.layers.attention.alibi_channels import with_alibi_channels
from recurjax.layers.attention.bands import attend_in_bands
from recurjax.layers.attention.blocked import attend_in_blocks
from recurjax.layers.attention.implementation import (
    AttentionCall,
    AttentionImplementation,
    choose,
)
from recurjax.layers.attention.splash import attend_by_splash
from recurjax.types import Array


def attend(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B S K E"],
    v: Float[Array, "B S K E"],
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    segments: Int[Array, "B T"] | None = None,
    slopes: np.ndarray | None = None,
    mask: Bool[Array, "#B #H #T S"] | None = None,
    bias: Float[Array, "#B #H #T S"] | None = None,
    soft_cap: float | None = None,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B T H E"]:
    """Computes o[t] = sum_s softmax_s(cap(scale q[t] k[s]) + bias[t, s]) v[s].

    Query head h reads key head h // (H / K). Logits and softmax are at least float32.
    Source: Vaswani et al. 2017, eq. (1); grouped queries: Ainslie et al. 2023; the cap
    is c tanh(logit / c) (Gemma Team 2024).

    Args:
      scale: multiplies q k^T.
      causal: hide s > t, by index; needs T = S.
      window: with `causal`, also hide s < t - window (so window + 1 keys are seen).
      segments: with `causal`, document of each position: no other's is seen.
      slopes: with `causal`, ALiBi's slope_h (H numbers): slope_h (t - s) is taken off
        the logits after the cap.
      mask: True where a key is visible; combined with what else hides. It and `bias`
        cost memory of T S; what the options above say is computed where it is needed.
      bias: added to the logits after the cap.
      soft_cap: c, or None.
      implementation: "cudnn" is jax's binding of cuDNN's flash attention, "splash"
        jax's kernel for TPUs, "cpu" our kernels in C++, "blocks" causal attention in
        blocks, all four in memory of B H T; "xla" plain XLA, whose logits take
        B H T S. None: the first of them that serves (blocks for long sequences only),
        see the folder's README.

    Raises:
      ValueError: `causal` with T != S, or an option that needs `causal` without it.
      NotImplementedError: the named implementation cannot.
    """
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            "attend: causal needs equally many queries and keys, got "
            f"{q.shape[1]} and {k.shape[1]}: pass a mask instead"
        )
    by_place = {"window": window, "segments": segments, "slopes": slopes}
    for name, value in by_place.items():
        if value is not None and not causal:
            raise ValueError(f"attend: {name} needs causal=True")
    call = AttentionCall(
        shape=q.shape,
        key_heads=k.shape[2],
        dtype=q.dtype,
        mixed=not q.dtype == k.dtype == v.dtype,
        causal=causal,
        window=window,
        dense=mask is not None or bias is not None,
        segments=segments is not None,
        alibi=slopes is not None,
        soft_cap=soft_cap,
    )
    hidden = {"window": window, "segments": segments}
    match choose(call, implementation):
        case "cudnn":
            return _cudnn(q, k, v, scale, window, slopes)
        case "splash":
            options = hidden | {"slopes": slopes, "soft_cap": soft_cap}
            return attend_by_splash(q, k, v, scale=scale, **options)
        case "cpu":
            options = hidden | {"slopes": slopes, "implementation": "cpu"}
            return attend_in_bands(q, k, v, scale=scale, **options)
        case "blocks":
            options = hidden | {"slopes": slopes, "soft_cap": soft_cap}
            return attend_in_blocks(q, k, v, scale=scale, **options)
        case "xla":
            mask, bias = _dense(q, segments, slopes, mask, bias)
            options = (scale, mask, bias, soft_cap)
            return _xla(q, k, v, *options, causal, window, named=bool(implementation))


def visible_by_position(
    query_positions: Int[Array, "#B T"],
    key_positions: Int[Array, "#B S"],
    *,
    window: int | None = None,
) -> Bool[Array, "#B 1 T S"]:
    """Returns the mask of keys at 0 <= i - j <= window; a key at j < 0 is empty."""
    i, j = query_positions[:, :, None], key_positions[:, None, :]
    visible = (j >= 0) & (j <= i)
    if window is not None:
        visible &= i - j <= window
    return visible[:, None]


def _cudnn(q, k, v, scale, window, slopes) -> Array:
    E = q.shape[3]
    if slopes is not None:
        q, k = with_alibi_channels(q, k, slopes, scale=scale)
        # jax's binding wants values as wide as keys.
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[3] - E)))
    o = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        implementation="cudnn",
    )
    return o[..., :E]


def _xla(q, k, v, scale, mask, bias, soft_cap, causal, window, *, named: bool) -> Array:
    if not named and not causal and few_queries.pay_off(q.shape[1], q.shape[2]):
        products = few_queries.few_logits, few_queries.few_mixtures
        return _plain_attention(q, k, v, scale, mask, bias, soft_cap, *products)
    (B, T), S = q.shape[:2], k.shape[1]
    if not named and not causal and few_queries.choose_part(B, T, S) < S:
        products = _logits, _mixtures_by_sums
        return _plain_attention(q, k, v, scale, mask, bias, soft_cap, *products)
    # The softmax of jax.nn.dot_product_attention is float32 for float64 inputs too.
    if soft_cap is not None or q.dtype == jnp.float64:
        if causal:
            # The plain form knows no causal flag: the mask is made from indices, which
            # T = S allows.
            mask = _and(mask, _causal_mask(q.shape[1], window))
        products = _logits, _mixtures
        return _plain_attention(q, k, v, scale, mask, bias, soft_cap, *products)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window, 0),
        implementation="xla",
    )


def _dense(q, segments, slopes, mask, bias) -> tuple[Array | None, Array | None]:
    """Returns mask and bias with what the other options hide and add, as arrays."""
    if segments is not None:
        mask = _and(mask, (segments[:, :, None] == segments[:, None])[:, None])
    if slopes is not None:
        wide = jnp.promote_types(q.dtype, jnp.float32)
        t = jnp.arange(q.shape[1])
        distance = jnp.abs(t[:, None] - t).astype(wide)
        of_alibi = -jnp.asarray(slopes, wide)[:, None, None] * distance
        bias = of_alibi[None] if bias is None else bias + of_alibi
    return mask, bias


def _plain_attention(q, k, v, scale, mask, bias, soft_cap, product, mixtures):
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    logits = product(q, k, dtype) * scale  # [B, H, T, S]
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        # Finite: a query that sees no key gets a mean of all values. NaN would make the
        # gradient of the entire batch NaN, even if the query does not count.
        logits = jnp.where(mask, logits, 0.7 * jnp.finfo(dtype).min)
    return mixtures(reductions.softmax(logits).astype(v.dtype), v)


def _logits(q, k, dtype) -> Array:
    B, T, H, E = q.shape
    # Query head h = key head times H / K + place in its group, so grouping is a reshape
    # and keys are never repeated.
    folded = q.reshape(B, T, k.shape[2], -1, E)
    logits = jnp.einsum("btkge,bske->bkgts", folded, k, preferred_element_type=dtype)
    return logits.reshape(B, H, T, -1)


def _mixtures(weights, v) -> Array:
    B, H, T, S = weights.shape
    weights = weights.reshape(B, v.shape[2], -1, T, S)
    return jnp.einsum("bkgts,bske->btkge", weights, v).reshape(B, T, H, -1)


def _mixtures_by_sums(weights, v) -> Array:
    B, H, _, S = weights.shape
    wide = jnp.promote_types(v.dtype, jnp.float32)
    p = weights.reshape(B, v.shape[2], -1, S).transpose(0, 3, 1, 2).astype(wide)
    return few_queries.summed_mixtures(p, v).reshape(B, 1, H, -1).astype(v.dtype)


def _causal_mask(length: int, window: int | None) -> Array:
    positions = np.arange(length)[None]
    return visible_by_position(
        jnp.asarray(positions), jnp.asarray(positions), window=window
    )


def _and(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b
