"""Gradients of the weights from those of a tile's rows: one contraction a matrix."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import (
    Prepared,
    activate,
    persistent_source,
    place_heads,
    pre_norm,
)
from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.xla.recurrence_backward import (
    RowGradients,
    TileRows,
)


def zeros_like_weights(w: Prepared, dtype) -> Prepared:
    """Makes the wide accumulators of all weights."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), w)


def of_recurrence(
    total: Prepared, g: RowGradients, rows: TileRows, turn, w: Prepared, spec: LayerSpec
) -> Prepared:
    """Adds what a tile's recurrence owes to w_kv, w_out and the MLP."""
    s = spec.residual_scale
    hidden = activate(rows.pre, spec, gated=w.w_in.shape[-1] != w.w_down.shape[1])
    normed, pull_mlp_norm = jax.vjp(lambda p: pre_norm(rows.y, p, spec), w.mlp_norm)
    source, pull_norm = jax.vjp(
        lambda p: persistent_source(rows.z, w._replace(attention_norm=p), spec),
        w.attention_norm,
    )
    k, _ = jnp.split(rows.projected, 2, axis=-1)
    keys, pull_k_norm = jax.vjp(lambda p: place_heads(k, p, turn, spec), w.k_norm)
    return _add(
        total,
        w_kv=_product(source, g.projected, spec),
        w_out=_product(rows.attended, s * g.y, spec),
        w_in=_product(normed, g.pre, spec),
        w_down=_product(hidden, s * g.z, spec),
        b_kv=_sum(g.projected, w.b_kv),
        b_out=_sum(s * g.y, w.b_out),
        b_in=_sum(g.pre, w.b_in),
        b_down=_sum(s * g.z, w.b_down),
        attention_norm=pull_norm(g.source)[0],
        mlp_norm=pull_mlp_norm(g.normed)[0],
        k_norm=pull_k_norm(g.keys.reshape(keys.shape))[0],
    )


def of_projections(
    total: Prepared,
    normed: Array,
    for_flat: Array,
    for_norms: dict[str, tuple[Array | None, Array | None]],
    spec: LayerSpec,
) -> Prepared:
    """Adds what a tile's queries and temporary pairs owe.

    Args:
      normed: rows that w_qkv reads; for_flat: gradient of what it writes.
      for_norms: gradients of attention_norm, q_norm and k_norm.
    """
    return _add(
        total,
        w_qkv=_product(normed, for_flat, spec),
        b_qkv=_sum(for_flat, total.b_qkv),
        **for_norms,
    )


def _product(rows: Array, gradients: Array, spec: LayerSpec) -> Array:
    """Contracts rows [L, b, B, N] with [L, b, B, M] to [L, N, M]."""
    rows, narrow = rows.astype(spec.dtype), gradients.astype(spec.dtype)
    return jnp.einsum(
        "ltbn,ltbm->lnm", rows, narrow, preferred_element_type=gradients.dtype
    )


def _sum(gradients: Array, bias: Array | None) -> Array | None:
    return None if bias is None else jnp.sum(gradients, axis=(1, 2))


def _add(total: Prepared, **more: Any) -> Prepared:
    """Adds field by field; None adds nothing."""
    added = {
        name: jax.tree.map(jnp.add, getattr(total, name), new)
        for name, new in more.items()
        if new is not None
    }
    return total._replace(**added)
