"""The attention layer: projections, qk-norm, positions, cache."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.attention import AttentionImplementation, attend
from recurjax.layers.cached_attention import attend_to_cache
from recurjax.layers.heads import merge, project
from recurjax.layers.initialization import InitConfig, draw_output_weight, draw_weight
from recurjax.layers.key_value_cache import KeyValueCache
from recurjax.layers.norm import Norm, NormConfig
from recurjax.layers.position import (
    Alibi,
    PositionConfig,
    Rope,
    alibi_bias,
    rotary_width,
    rotate,
)
from recurjax.types import Array, Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Multi-head, grouped-query or multi-query attention.

    Attributes:
      heads: H.
      key_heads: K, a divisor of H.
      head_width: E; H * E may differ from the model's width.
      position: encoding of positions; learned ones are added by the stack.
      qk_norm: norm of queries and keys before the rotation, or None.
      qk_norm_over: "head": each head by itself, with one scale [E] for all heads;
        "full": all heads together, with a scale [H * E].
      qkv_bias: biases on the q, k and v projections (Qwen2).
      out_bias: a bias on the output projection.
      scale: of the logits; None means 1/sqrt(E).
      soft_cap: c in c tanh(logit / c), or None.
      implementation: see `attend`.
    """

    heads: int
    key_heads: int
    head_width: int
    position: PositionConfig | None = field(default_factory=Rope)
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "full"] = "head"
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    implementation: AttentionImplementation | None = None

    def __post_init__(self):
        for name in ("heads", "key_heads", "head_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"AttentionConfig: {name} must be at least 1")
        if self.heads % self.key_heads:
            raise ValueError(
                f"AttentionConfig: key_heads must divide heads, got {self.key_heads} "
                f"and {self.heads}"
            )
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"AttentionConfig: soft_cap must be > 0: {self.soft_cap}")
        if isinstance(self.position, Rope):
            rotary_width(self.head_width, self.position)


class SelfAttention(nnx.Module):
    """Causal self-attention: o = attend(q, k, v) W_out over the cache and the input."""

    def __init__(
        self,
        config: AttentionConfig,
        width: int,
        init: InitConfig,
        *,
        window: int | None,
        layer: Array | int,
        layers: int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.window = window
        H, K, E = config.heads, config.key_heads, config.head_width
        draw = partial(draw_weight, fan_in=width, config=init)
        self.w_q = nnx.Param(draw(rngs.params(), (width, H, E)))
        self.w_k = nnx.Param(draw(rngs.params(), (width, K, E)))
        self.w_v = nnx.Param(draw(rngs.params(), (width, K, E)))
        self.w_out = nnx.Param(
            draw_output_weight(
                rngs.params(),
                (H, E, width),
                fan_in=H * E,
                layer=layer,
                layers=layers,
                config=init,
            )
        )
        zeros = partial(jnp.zeros, dtype=jnp.float32)
        self.b_q = nnx.Param(zeros((H, E))) if config.qkv_bias else None
        self.b_k = nnx.Param(zeros((K, E))) if config.qkv_bias else None
        self.b_v = nnx.Param(zeros((K, E))) if config.qkv_bias else None
        self.b_out = nnx.Param(zeros(width)) if config.out_bias else None
        norm, full = config.qk_norm, config.qk_norm_over == "full"
        self.q_norm = None if norm is None else Norm(norm, H * E if full else E)
        self.k_norm = None if norm is None else Norm(norm, K * E if full else E)

    def __call__(
        self, x: Float[Array, "B T D"], cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        T = x.shape[1]
        training = cache.slots == 0
        # All rows stand at 0 in training, so one row of positions serves them all.
        start = jnp.zeros((1, 1), jnp.int32) if training else cache.position[:, None]
        positions = start + jnp.arange(T)  # [1 or B, T]
        q, k, v = self._project(x, positions)
        if training:
            o = self._attend_to_input(q, k, v, positions, tokens)
        else:
            o, cache = self._attend_to_cache(q, k, v, cache, tokens)
        return merge(o, self.w_out, self.b_out), cache

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        q = project(x, self.w_q, self.b_q)
        k = project(x, self.w_k, self.b_k)
        v = project(x, self.w_v, self.b_v)
        if self.q_norm is not None and self.k_norm is not None:
            if self.config.qk_norm_over == "full":
                B, T = x.shape[:2]
                q = self.q_norm(q.reshape(B, T, -1)).reshape(q.shape)
                k = self.k_norm(k.reshape(B, T, -1)).reshape(k.shape)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(self.config.position, Rope):
            q = rotate(q, positions, self.config.position)
            k = rotate(k, positions, self.config.position)
        return q, k, v

    def _attend_to_input(self, q, k, v, positions, tokens: Tokens) -> Array:
        mask = None
        if tokens.segments is not None:
            segments = tokens.segments
            mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        return attend(
            q,
            k,
            v,
            scale=self._scale(),
            causal=True,
            window=self.window,
            mask=mask,
            bias=self._bias(positions, positions, q.dtype),
            soft_cap=self.config.soft_cap,
            implementation=self.config.implementation,
        )

    def _attend_to_cache(
        self, q, k, v, cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Array, KeyValueCache]:
        if tokens.segments is not None:
            raise NotImplementedError(
                "SelfAttention: segments are for the training cache (length 0) only"
            )
        return attend_to_cache(
            q,
            k,
            v,
            cache,
            scale=self._scale(),
            window=self.window,
            lengths=tokens.lengths,
            soft_cap=self.config.soft_cap,
            bias=partial(self._bias, dtype=q.dtype),
        )

    def _scale(self) -> float:
        config = self.config
        return config.head_width**-0.5 if config.scale is None else config.scale

    def _bias(self, query_positions, key_positions, dtype) -> Array | None:
        if not isinstance(self.config.position, Alibi):
            return None
        return alibi_bias(
            self.config.heads,
            query_positions,
            key_positions,
            self.config.position,
            dtype=jnp.promote_types(dtype, jnp.float32),
        )
