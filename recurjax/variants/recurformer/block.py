"""One RecurFormer layer: some heads attend, Mamba replaces the others."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from recurjax.layers.attention import (
    KeyValueCache,
    SelfAttention,
    attend,
    attend_to_cache,
    merge,
    project,
)
from recurjax.layers.initialization import draw_output_weight, draw_weight
from recurjax.layers.linear import apart
from recurjax.layers.mamba import Mamba, MambaCache
from recurjax.layers.mlp import Mlp
from recurjax.layers.norm import Norm
from recurjax.layers.position import Rope, document_starts, rotate
from recurjax.types import Array, Tokens
from recurjax.variants.recurformer.config import LayerHeads, RecurFormerConfig
from recurjax.variants.transformer.block import ResidualBlock


class LayerCache(NamedTuple):
    """The cache of one layer.

    Attributes:
      keys_values: cache of the key heads that a remaining head reads.
      mamba: cache of the Mamba mixer; without replaced heads it has no channels.
    """

    keys_values: KeyValueCache
    mamba: MambaCache


class PartialAttention(nnx.Module):
    """Attention of some heads, Mamba in the place of the others, the old output weight.

    v = W_v x for all key heads; the remaining heads attend with q and k of their own;
    the replaced heads' v, side by side, go through Mamba, whose output is cut the same
    way; all heads in their old order then meet W_out. Source: RecurFormer, section 3.2.
    """

    def __init__(self, config: RecurFormerConfig, *, layer: int, rngs: nnx.Rngs):
        base = config.transformer
        a, D, init = base.attention_of(base.kind_of(layer)), base.width, base.init
        self.config, self.heads = a, config.heads(layer)
        heads, E = self.heads, a.head_width
        # Query heads that still attend, and the key heads that one of them reads.
        R, K = len(heads.remaining), len(heads.key_heads)
        draw = partial(draw_weight, fan_in=D, config=init)
        zeros = partial(jnp.zeros, dtype=jnp.float32)
        attends = R > 0
        self.w_q = nnx.Param(draw(rngs.params(), (D, R, E))) if attends else None
        self.w_k = nnx.Param(draw(rngs.params(), (D, K, E))) if attends else None
        # All values: replaced heads read them too, through Mamba.
        self.w_v = nnx.Param(draw(rngs.params(), (D, a.key_heads, E)))
        self.w_out = nnx.Param(
            draw_output_weight(
                rngs.params(),
                (a.heads, E, D),
                layer=layer,
                layers=base.layers,
                config=init,
            )
        )
        has_bias = a.qkv_bias
        self.b_q = nnx.Param(zeros((R, E))) if has_bias and attends else None
        self.b_k = nnx.Param(zeros((K, E))) if has_bias and attends else None
        self.b_v = nnx.Param(zeros((a.key_heads, E))) if has_bias else None
        self.b_out = nnx.Param(zeros(D)) if a.out_bias else None
        # A norm by head, which does not care how many heads there are.
        norm = a.qk_norm if attends else None
        self.q_norm = None if norm is None else Norm(norm, E)
        self.k_norm = None if norm is None else Norm(norm, E)
        self.mamba = Mamba(config.mamba, heads.mamba_width, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        training = cache.keys_values.slots == 0
        if tokens.segments is not None and not training:
            raise NotImplementedError(
                "PartialAttention: segments work with the training cache (length "
                "0) only: leave them out"
            )
        v = project(x, self.w_v, self.b_v)
        attended, keys_values = self._attend(x, v, cache.keys_values, tokens)
        recurrent, mamba = self._recur(v, cache.mamba, tokens, training)
        y = merge(in_place(attended, recurrent, self.heads), self.w_out, self.b_out)
        return y, LayerCache(keys_values, mamba)

    def _attend(
        self, x: Array, v: Array, cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T R E"], KeyValueCache]:
        """Returns what the remaining heads found; without any, nothing is read."""
        heads, config = self.heads, self.config
        # All heads replaced: nothing attends, and the cache stays as it is.
        if self.w_q is None or self.w_k is None:
            return v[:, :, :0], cache
        training = cache.slots == 0
        # In training every row starts at 0, in one row of positions for all.
        start = jnp.zeros((1, 1), jnp.int32) if training else cache.position[:, None]
        positions = start + jnp.arange(x.shape[1])
        x_q, x_k = apart(x, 2)
        q, k = project(x_q, self.w_q, self.b_q), project(x_k, self.w_k, self.b_k)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(config.position, Rope):
            length = cache.slots or x.shape[1]
            q = rotate(q, positions, config.position, length=length)
            k = rotate(k, positions, config.position, length=length)
        # Values of the key heads that are still read; Mamba takes the others'.
        v = v[:, :, np.asarray(heads.key_heads)]
        scale = config.head_width**-0.5 if config.scale is None else config.scale
        q, places = in_even_groups(q, heads)
        if training:
            o = attend(
                q,
                k,
                v,
                scale=scale,
                causal=True,
                segments=tokens.segments,
                soft_cap=config.soft_cap,
                implementation=config.implementation,
            )
        else:
            o, cache = attend_to_cache(
                q,
                k,
                v,
                cache,
                scale=scale,
                window=None,
                lengths=tokens.lengths,
                soft_cap=config.soft_cap,
            )
        return o[:, :, places], cache

    def _recur(
        self, v: Array, cache: MambaCache, tokens: Tokens, training: bool
    ) -> tuple[Float[Array, "B T R E"], MambaCache]:
        """Returns what Mamba makes of the replaced heads' values, by head."""
        B, T, _, E = v.shape
        starts = document_starts(tokens.segments)
        # Training forgets: the recurrence begins from zero in every row.
        before = self.mamba.init_cache(B) if training else cache
        y, after = self.mamba(
            # Each replaced head's values, of its group's key head, side by side.
            v[:, :, np.asarray(self.heads.group_of)].reshape(B, T, -1),
            before,
            starts=starts,
            lengths=tokens.lengths,
        )
        return y.reshape(B, T, -1, E), cache if training else after


class RecurFormerBlock(ResidualBlock):
    """A Transformer layer whose attention may have given up heads."""

    def __init__(self, config: RecurFormerConfig, *, layer: int, rngs: nnx.Rngs):
        base = config.transformer
        super().__init__(base)
        D, init = base.width, base.init
        depth = {"layer": layer, "layers": base.layers}
        # A layer that keeps all heads is the base's own, to the bit, windows too.
        if config.replaced[layer]:
            self.attention = PartialAttention(config, layer=layer, rngs=rngs)
        else:
            kind = base.kind_of(layer)
            self.attention = WholeAttention(
                base.attention_of(kind),
                D,
                init,
                window=kind.window,
                rngs=rngs,
                **depth,
            )
        self.mlp = Mlp(base.mlp, D, init, rngs=rngs, **depth)

    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        mixed, cache = self.attention(self.attention_input(x), cache, tokens)
        return self.add(x, mixed), cache


class WholeAttention(SelfAttention):
    """The base's attention, where no head is replaced."""

    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        y, keys_values = super().__call__(x, cache.keys_values, tokens)
        return y, LayerCache(keys_values, cache.mamba)


def in_place(
    attended: Float[Array, "B T R E"],
    recurrent: Float[Array, "B T n E"],
    heads: LayerHeads,
) -> Float[Array, "B T H E"]:
    """Puts all heads back in their old order."""
    # The index of each old head among the remaining or the replaced ones.
    order = np.argsort([*heads.remaining, *heads.replaced])
    return jnp.concatenate([attended, recurrent.astype(attended.dtype)], axis=2)[
        :, :, order
    ]


def in_even_groups(
    q: Float[Array, "B T R E"], heads: LayerHeads
) -> tuple[Float[Array, "B T N E"], np.ndarray]:
    """Lays query heads out so that each key head has as many, as attention wants them.

    Groups that lost more heads are padded with zero queries, whose results are unused.
    So keys and values are read in place: repeating them for every query head would copy
    the full cache at each decoded token.

    Returns:
      The queries, and the place of each remaining head among them.
    """
    counts = np.bincount(heads.key_head_of, minlength=len(heads.key_heads))
    # The largest group decides; smaller ones are filled up.
    size = int(counts.max())
    number = np.array(heads.key_head_of)
    # Number of a head within its own group: heads of a group are neighbours.
    within = np.arange(len(number)) - np.searchsorted(number, number)
    places = number * size + within
    if (counts == size).all():
        return q, places
    wide = jnp.zeros((*q.shape[:2], size * len(counts), q.shape[3]), q.dtype)
    return wide.at[:, :, places].set(q), places
