"""Between the model's width and heads: projections in, the merge out, grouped keys.

Weights keep heads as an axis of their own, [D, H, E] and [H, E, D], so that sharding
never cuts one; the products are those of the flat matrices [D, H E] and [H E, D].
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from pallas_kernels.uncopied_weights import merge_by_head
from recurjax.layers.linear import (
    PanelWeight,
    QuantizedWeight,
    Weight,
    base_and_adapters,
    decodes_on_gpu,
    linear,
    with_additions,
)
from recurjax.types import Array


def project(
    x: Float[Array, "... D"],
    weight: Weight,
    bias: Array | nnx.Param | None = None,
) -> Float[Array, "... H E"]:
    """Computes x W + b by head, with W [D, H, E] and b [H, E]."""
    y = project_flat(x, weight, bias)
    return y.reshape(*x.shape[:-1], *weight.shape[1:])


def project_flat(
    x: Float[Array, "... D"],
    weight: Weight,
    bias: Array | nnx.Param | None = None,
) -> Float[Array, "... HE"]:
    """Computes the same with all heads side by side: head h owns h E to (h + 1) E."""
    flat = weight[...].reshape(weight.shape[0], -1)
    # A bias of each token's own has tokens in front of the heads.
    flat_bias = None if bias is None else bias[...].reshape(*bias.shape[:-2], -1)
    return linear(x, flat, flat_bias)


def merge(
    y: Float[Array, "B T *heads"],
    weight: Weight,
    bias: Array | nnx.Param | None = None,
) -> Float[Array, "B T D"]:
    """Computes y W + b with W [H, E, D]: what the heads found, back to the width.

    Args:
      y: by head, [B, T, H, E], or with all heads side by side, [B, T, H E].
    """
    H, E, D = weight.shape
    flat = y.reshape(*y.shape[:2], -1)
    base, adapters = base_and_adapters(weight)
    if not decodes_on_gpu(y) or isinstance(base, QuantizedWeight | PanelWeight):
        return linear(flat, weight[...].reshape(-1, D), bias)
    merged = merge_by_head(y.reshape(-1, H, E), base.astype(y.dtype))
    return with_additions(merged[:, None].astype(y.dtype), flat, bias, adapters)


def keys_for_queries(
    k: Float[Array, "B S K E"], heads: int, key_head_of: Sequence[int] | None = None
) -> Float[Array, "B S H E"]:
    """Gives each of H query heads a copy of the key (or value) head it reads.

    Args:
      heads: H.
      key_head_of: the key head of each query head. None: groups of H / K neighbours
        share one, query head h reads h // (H / K). A layer that keeps only some of its
        query heads names theirs here, since neighbours then no longer tell.
    """
    if key_head_of is None:
        return jnp.repeat(k, heads // k.shape[2], axis=2)
    if len(key_head_of) != heads:
        raise ValueError(
            "keys_for_queries: key_head_of must name a key head for each of "
            f"{heads} query heads, got {len(key_head_of)}"
        )
    return k[:, :, np.asarray(key_head_of)]
