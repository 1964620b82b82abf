"""The paper's equations for one position, section 3.2; the op computes the same.

    q_i  = qknorm(Q n(x_i)),  kt_i = qknorm(K n(x_i)),  vt_i = V n(x_i)
    a_i  = Attn((k_1, v_1) ... (k_{i-1}, v_{i-1}), (kt_i, vt_i); q_i)
    z_i  = x_i + s (a_i + MLP(n'(x_i + s a_i))),  s = 1/sqrt(L)
    k_i  = qknorm(K n(z_i)),  v_i = V n(z_i)

Positions count from 0. A layer is a `RecurrentTransformerBlock` of one layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from recurjax.layers.norm import Norm
from recurjax.layers.position import Alibi, Rope, alibi_slopes, rotate
from recurjax.types import Array
from recurjax.variants.recurrent_transformer.block import (
    RecurrentTransformerBlock,
    residual_scale_of,
)
from recurjax.variants.recurrent_transformer.config import RecurrentTransformerConfig


class Pair(NamedTuple):
    """A key and a value of each row."""

    key: Float[Array, "B K E"]
    value: Float[Array, "B K E"]


def recurrent_layer(
    block: RecurrentTransformerBlock,
    config: RecurrentTransformerConfig,
    x: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """Runs a layer position by position."""
    persistent: list[Pair] = []
    outputs = []
    for i in range(x.shape[1]):
        q, temporary = query_and_temporary_pair(block, x[:, i], i)
        a = attend(block, q, [*persistent, temporary], config)
        z = layer_output(block, config, x[:, i], a)
        persistent.append(persistent_pair(block, config, z, i))
        outputs.append(z)
    return jnp.stack(outputs, axis=1)


def query_and_temporary_pair(
    block: RecurrentTransformerBlock, x: Float[Array, "B D"], i: int
) -> tuple[Float[Array, "B H E"], Pair]:
    """Projects the layer's input: the query, and the pair for position i only."""
    n = _normed(block.attention_norm, x)
    a = block.attention
    q = _heads(n, a.w_q[...], a.b_q, a.q_norm)
    return _place(q, i, a.config.position), _pair(block, n, i)


def attend(
    block: RecurrentTransformerBlock,
    q: Float[Array, "B H E"],
    pairs: list[Pair],
    config: RecurrentTransformerConfig,
) -> Float[Array, "B D"]:
    """Attends to all earlier persistent pairs and, last, to the temporary one."""
    group = config.heads // config.key_heads
    k = jnp.repeat(jnp.stack([pair.key for pair in pairs], axis=1), group, axis=2)
    v = jnp.repeat(jnp.stack([pair.value for pair in pairs], axis=1), group, axis=2)
    logits = jnp.einsum("bhe,bshe->bhs", q, k) * config.head_width**-0.5
    if isinstance(config.position, Alibi):
        distance = jnp.arange(len(pairs) - 1, -1, -1)
        slopes = jnp.asarray(alibi_slopes(config.heads, config.position), q.dtype)
        logits = logits - slopes[:, None] * distance
    p = jax.nn.softmax(logits, axis=-1)
    a = jnp.einsum("bhs,bshe,hed->bd", p, v, block.attention.w_out[...])
    bias = block.attention.b_out
    return a if bias is None else a + bias[...]


def layer_output(
    block: RecurrentTransformerBlock,
    config: RecurrentTransformerConfig,
    x: Float[Array, "B D"],
    a: Float[Array, "B D"],
) -> Float[Array, "B D"]:
    """Adds both branches to the residual stream."""
    s = residual_scale_of(config)
    y = x + s * a
    return y + s * block.mlp(_normed(block.mlp_norm, y)[:, None])[:, 0]


def persistent_pair(
    block: RecurrentTransformerBlock,
    config: RecurrentTransformerConfig,
    z: Float[Array, "B D"],
    i: int,
) -> Pair:
    """Projects the layer's output, by the same weights, for all later positions."""
    source = _normed(block.attention_norm, z) if config.normed_persistent else z
    return _pair(block, source, i)


def _pair(block: RecurrentTransformerBlock, n: Array, i: int) -> Pair:
    a = block.attention
    k = _heads(n, a.w_k[...], a.b_k, a.k_norm)
    return Pair(
        key=_place(k, i, a.config.position), value=_heads(n, a.w_v[...], a.b_v, None)
    )


def _heads(n: Array, weight: Array, bias, norm: Norm | None) -> Array:
    y = jnp.einsum("bd,dhe->bhe", n, weight)
    y = y if bias is None else y + bias[...]
    return _normed(norm, y.reshape(y.shape[0], -1)).reshape(y.shape)


def _normed(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _place(heads: Array, i: int, position) -> Array:
    if not isinstance(position, Rope):
        return heads
    return rotate(heads[:, None], jnp.full((1, 1), i), position)[:, 0]
