"""Softmax attention of arrays: grouped-query, windowed, biased, capped."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from pallas_kernels import target
from recurjax.layers.attention.blocked import attend_in_blocks
from recurjax.layers.attention.few_queries import MOST_ROWS, few_logits, few_mixtures
from recurjax.types import Array

AttentionImplementation = Literal["xla", "cudnn", "blocks"]

_CUDNN_HEAD_WIDTH = 128  # The widest head for which cuDNN has a backward on every GPU.
_BLOCKS_FROM = 1024  # Shorter sequences' logits fit beside everything else.


def attend(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B S K E"],
    v: Float[Array, "B S K E"],
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
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
      mask: True where a key is visible; combined with `causal`.
      bias: added to the logits after the cap.
      soft_cap: c, or None.
      implementation: "cudnn" is jax's binding of cuDNN's flash attention, "xla" plain
        XLA (its logits take B H T S memory), "blocks" causal attention in blocks,
        which takes B H T. None: cuDNN where it serves, else blocks for long sequences
        (off the GPU), else "xla".

    Raises:
      ValueError: `causal` with T != S, or `window` without `causal`.
      NotImplementedError: cuDNN or blocks were asked for and cannot.
    """
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"attend: causal needs as many queries as keys, got {q.shape[1]} and "
            f"{k.shape[1]}: pass a mask by position"
        )
    if window is not None and not causal:
        raise ValueError("attend: window needs causal=True")
    obstacle = _cudnn_obstacle(q, mask, bias, soft_cap)
    if implementation == "cudnn" and obstacle is not None:
        raise NotImplementedError(f"attend: cudnn: {obstacle}")
    no_blocks = _blocks_obstacle(causal, mask, bias, soft_cap)
    if implementation == "blocks" and no_blocks is not None:
        raise NotImplementedError(f"attend: blocks: {no_blocks}")
    if implementation is None and obstacle is not None and no_blocks is None:
        long = q.shape[1] >= _BLOCKS_FROM and not target.current().calls_cudnn
        # Logits of a long row would be the largest array of a training step; blocks
        # never hold them. On a GPU with cuDNN plain XLA stays the choice for what cuDNN
        # refuses.
        implementation = "blocks" if long else None
    if implementation == "blocks":
        return attend_in_blocks(q, k, v, scale=scale, window=window)
    if implementation is None and not causal and _few(q):
        products = few_logits, few_mixtures
        return _plain_attention(q, k, v, scale, mask, bias, soft_cap, *products)
    # The softmax of jax.nn.dot_product_attention is float32 for float64 inputs too.
    if soft_cap is not None or q.dtype == jnp.float64:
        if causal:
            # The plain form knows no causal flag: the mask is made from indices, which
            # T = S allows.
            mask = _and(mask, _causal_mask(q.shape[1], window))
        products = _logits, _mixtures
        return _plain_attention(q, k, v, scale, mask, bias, soft_cap, *products)
    use_cudnn = obstacle is None and implementation != "xla"
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window, 0),
        implementation="cudnn" if use_cudnn else "xla",
    )


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


def _few(q: Array) -> bool:
    """Returns whether a copy of the keys costs more than this query's products."""
    # A decode step on a CPU; on other devices the copy overlaps with what follows.
    few = q.shape[1] == 1 and q.shape[2] <= MOST_ROWS
    return few and target.current().platform == "cpu"


def _plain_attention(q, k, v, scale, mask, bias, soft_cap, product, mixtures):
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    logits = product(q, k, dtype) * scale  # [B, H, T, S]
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        # Finite: a query that sees no key gets a mean of all values and not NaN, whose
        # gradient would spoil the whole batch even where the query does not count.
        logits = jnp.where(mask, logits, 0.7 * jnp.finfo(dtype).min)
    return mixtures(jax.nn.softmax(logits, axis=-1).astype(v.dtype), v)


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


def _causal_mask(length: int, window: int | None) -> Array:
    positions = np.arange(length)[None]
    return visible_by_position(
        jnp.asarray(positions), jnp.asarray(positions), window=window
    )


def _and(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


def _blocks_obstacle(causal, mask, bias, soft_cap) -> str | None:
    """Returns why attention in blocks cannot serve, or None when it can."""
    if soft_cap is not None:
        return "a soft cap is not supported"
    if mask is not None or bias is not None:
        return "a dense mask or bias would cost O(T S) memory"
    return None if causal else "only causal attention is cut into blocks"


def _cudnn_obstacle(q, mask, bias, soft_cap) -> str | None:
    """Returns why cuDNN's flash attention cannot serve, or None when it can."""
    if soft_cap is not None:
        return "a soft cap is not supported"
    if mask is not None or bias is not None:
        return "a dense mask or bias would cost O(T S) memory"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype must be bfloat16 or float16, got {q.dtype}"
    E = q.shape[-1]
    if E % 8 or E > _CUDNN_HEAD_WIDTH:
        return f"head width must be a multiple of 8 up to 128, got {E}"
    if not target.current().calls_cudnn:
        return f"needs a GPU with cuDNN, found {target.current().platform}"
    return target.refusal_of_capability()
