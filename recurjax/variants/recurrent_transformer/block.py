"""The parameters of Recurrent Transformer layers, and the op that runs them."""

from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from pallas_kernels.recurrent_prefill import (
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    Rows,
    recurrent_prefill,
)
from pallas_kernels.recurrent_prefill.call import Dtype
from recurjax.layers.attention import AttentionConfig, SelfAttention
from recurjax.layers.linear import count_adapters, plain, rows_of, with_adapter
from recurjax.layers.mesh import keep_slots_apart
from recurjax.layers.mlp import Mlp
from recurjax.layers.norm import Norm
from recurjax.layers.position import Alibi, Rope, rotary_width
from recurjax.layers.stack import residual_scale
from recurjax.types import Array, Tokens
from recurjax.variants.recurrent_transformer.config import RecurrentTransformerConfig


class RecurrentTransformerBlock(nnx.Module):
    """Holds a layer's weights, under a Transformer layer's names: it has no others."""

    def __init__(
        self, config: RecurrentTransformerConfig, *, layer: Array | int, rngs: nnx.Rngs
    ):
        D, init = config.width, config.init
        depth = {"layer": layer, "layers": config.layers}
        # The same attention config as a Transformer's, so that weights have its names.
        attention = AttentionConfig(
            heads=config.heads,
            key_heads=config.key_heads,
            head_width=config.head_width,
            position=config.position,
            qk_norm=config.qk_norm,
            # The norm of q and k is over all heads together, as the paper has it.
            qk_norm_over="full",
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )
        self.attention_norm = None if config.norm is None else Norm(config.norm, D)
        self.attention = SelfAttention(
            attention, D, init, window=None, rngs=rngs, **depth
        )
        self.mlp_norm = None if config.norm is None else Norm(config.norm, D)
        self.mlp = Mlp(config.mlp, D, init, rngs=rngs, **depth)


def run_layers(
    config: RecurrentTransformerConfig,
    blocks: RecurrentTransformerBlock,
    x: Float[Array, "B T D"],
    cache: RecurrentCache,
    tokens: Tokens,
) -> tuple[Float[Array, "B T D"], RecurrentCache]:
    """Runs T more positions through stacked blocks, also of several adapters.

    Raises:
      NotImplementedError: segments with a real cache.
    """
    rows = rows_of(blocks)
    if rows is None:
        return _run(config, blocks, x, cache, tokens)
    # The op reads one matrix for all rows, so it runs once for each adapter that any
    # row has; the other rows are then of length 0.
    B, T, _ = x.shape
    lengths = jnp.full(B, T) if tokens.lengths is None else tokens.lengths

    def turn(number, state):
        having = rows == number

        def run():
            some = tokens._replace(lengths=jnp.where(having, lengths, 0))
            z, cache = _run(config, with_adapter(blocks, number), x, state[1], some)
            return jnp.where(having[:, None, None], z, state[0]), cache

        reads = jnp.any(having & (lengths > 0))
        return jax.lax.cond(reads, run, lambda: state)

    return jax.lax.fori_loop(0, count_adapters(blocks), turn, (x, cache))


def _run(
    config: RecurrentTransformerConfig,
    blocks: RecurrentTransformerBlock,
    x: Float[Array, "B T D"],
    cache: RecurrentCache,
    tokens: Tokens,
) -> tuple[Float[Array, "B T D"], RecurrentCache]:
    z, cache = recurrent_prefill(
        # The residual stream crosses positions here, so it stays in at least float32.
        x.astype(jnp.promote_types(x.dtype, jnp.float32)),
        weights_of(blocks),
        cache,
        spec=spec_of(config, x.dtype.name),
        rows=Rows(lengths=tokens.lengths, segments=tokens.segments),
        schedule=config.schedule,
        tile=config.tile,
    )
    if cache.slots:
        keys, values = keep_slots_apart(cache.keys), keep_slots_apart(cache.values)
        cache = cache._replace(keys=keys, values=values)
    return z.astype(x.dtype), cache


def weights_of(blocks: RecurrentTransformerBlock) -> LayerWeights:
    """Returns the op's weights of stacked blocks.

    The op reads each matrix at every position, so an adapter is added to its matrix
    once, before the op.
    """
    a, m = blocks.attention, blocks.mlp
    # Norms by the names that the op has for them; a layer may lack any of them.
    norms = {
        "attention_norm": blocks.attention_norm,
        "mlp_norm": blocks.mlp_norm,
        "q_norm": a.q_norm,
        "k_norm": a.k_norm,
    }
    parts = {}
    for name, norm in norms.items():
        parts[f"{name}_scale"], parts[f"{name}_bias"] = _scale_and_bias(norm)
    return LayerWeights(
        w_q=plain(a.w_q),
        w_k=plain(a.w_k),
        w_v=plain(a.w_v),
        w_out=plain(a.w_out),
        w_up=plain(m.w_up),
        w_gate=_value(m.w_gate),
        w_down=plain(m.w_down),
        b_q=_value(a.b_q),
        b_k=_value(a.b_k),
        b_v=_value(a.b_v),
        b_out=_value(a.b_out),
        b_up=_value(m.b_up),
        b_gate=_value(m.b_gate),
        b_down=_value(m.b_down),
        **parts,
    )


def spec_of(config: RecurrentTransformerConfig, dtype: str) -> LayerSpec:
    """Returns the op's static view of a layer that computes in `dtype`."""
    position, E = config.position, config.head_width
    # The op knows no classes of ours: each choice becomes a number or a word.
    rope = position if isinstance(position, Rope) else None
    norm, qk_norm = config.norm, config.qk_norm
    return LayerSpec(
        heads=config.heads,
        key_heads=config.key_heads,
        head_width=E,
        norm="none" if norm is None else norm.kind,
        norm_eps=0.0 if norm is None else norm.eps,
        qk_norm="none" if qk_norm is None else qk_norm.kind,
        qk_norm_eps=0.0 if qk_norm is None else qk_norm.eps,
        normed_persistent=config.normed_persistent,
        alibi_max_bias=position.max_bias if isinstance(position, Alibi) else None,
        rope_base=None if rope is None else rope.base,
        rope_width=0 if rope is None else rotary_width(E, rope),
        # The op multiplies logits by this; queries and keys are normed before.
        logit_scale=E**-0.5,
        residual_scale=residual_scale(config.residual_scale, config.layers),
        activation=config.mlp.activation,
        block=config.block,
        dtype=cast(Dtype, dtype),
    )


def _scale_and_bias(norm: Norm | None) -> tuple[Array | None, Array | None]:
    if norm is None:
        return None, None
    scale = _value(norm.scale)
    # Gemma's form, 1 + scale, is resolved here; the op multiplies by one scale.
    if scale is not None and norm.config.one_plus:
        scale = 1 + scale
    return scale, _value(norm.bias)


def _value(parameter: nnx.Param | None) -> Array | None:
    return None if parameter is None else plain(parameter)
