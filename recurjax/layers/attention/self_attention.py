"""The attention layer: projections, qk-norm, positions, cache."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from pallas_kernels import target
from recurjax.layers.attention.heads import merge, project
from recurjax.layers.attention.implementation import AttentionImplementation
from recurjax.layers.attention.key_value_cache import (
    KeyValueCache,
    attend_to_cache,
    attend_to_written,
    write,
)
from recurjax.layers.attention.softmax import attend
from recurjax.layers.initialization import InitConfig, draw_output_weight, draw_weight
from recurjax.layers.linear import Maps, apart
from recurjax.layers.norm import Norm, NormConfig
from recurjax.layers.position import (
    Alibi,
    PositionConfig,
    Rope,
    alibi_bias,
    alibi_slopes,
    rotary_width,
    rotate,
)
from recurjax.ranges import PositiveFloat, PositiveInt, check_ranges
from recurjax.types import Array, Tokens

_FEW = 16
"""Queries that read a cache as fast as they read what is new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Multi-head, grouped-query or multi-query attention.

    Attributes:
      heads: H, the number of query heads.
      key_heads: K, the number of key and value heads, a divisor of H: K = H is
        multi-head, K = 1 multi-query attention.
      head_width: E, the width of a head; H * E may differ from the model width.
      position: position encoding; None: none (NoPE). The stack adds learned positions
        to its input.
      qk_norm: norm of queries and keys before the rotation; None: no norm.
      qk_norm_over: what `qk_norm` normalizes: "head", each head, with one scale [E] for
        all; "full", all heads together, with a scale [H * E].
      qkv_bias: add biases to the query, key and value projections (Qwen2).
      out_bias: add a bias to the output projection.
      scale: factor of the attention logits; None: 1/sqrt(E).
      soft_cap: c in c tanh(logit / c) of the attention logits (Gemma 2); None: no cap.
      implementation: the attention kernel, as in `attend`; None: the fastest that
        supports the call.
    """

    heads: PositiveInt
    key_heads: PositiveInt
    head_width: PositiveInt
    position: PositionConfig | None = field(default_factory=Rope)
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "full"] = "head"
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    soft_cap: PositiveFloat | None = None
    implementation: AttentionImplementation | None = None

    def __post_init__(self):
        check_ranges(self)
        if self.heads % self.key_heads:
            raise ValueError(
                f"AttentionConfig: key_heads must divide heads, got {self.key_heads} "
                f"and {self.heads}"
            )
        if isinstance(self.position, Rope):
            rotary_width(self.head_width, self.position)

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        maps = {"q": (width, queries), "k": (width, keys), "v": (width, keys)}
        return maps | {"out": (queries, width)}


class KeysValues(NamedTuple):
    """New keys, after norm and rotation, and values of T tokens."""

    keys: Float[Array, "B T K E"]
    values: Float[Array, "B T K E"]


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
                rngs.params(), (H, E, width), layer=layer, layers=layers, config=init
            )
        )
        zeros = partial(jnp.zeros, dtype=jnp.float32)
        self.b_q = nnx.Param(zeros((H, E))) if config.qkv_bias else None
        self.b_k = nnx.Param(zeros((K, E))) if config.qkv_bias else None
        self.b_v = nnx.Param(zeros((K, E))) if config.qkv_bias else None
        self.b_out = nnx.Param(zeros(width)) if config.out_bias else None
        # Over a head at a time, or over all heads' channels at once, as the model was
        # trained.
        norm, full = config.qk_norm, config.qk_norm_over == "full"
        self.q_norm = None if norm is None else Norm(norm, H * E if full else E)
        self.k_norm = None if norm is None else Norm(norm, K * E if full else E)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: KeyValueCache,
        tokens: Tokens,
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        y, cache, _ = self.keep(x, cache, tokens)
        return y, cache

    def keep(
        self,
        x: Float[Array, "B T D"],
        cache: KeyValueCache,
        tokens: Tokens,
    ) -> tuple[Float[Array, "B T D"], KeyValueCache, KeysValues]:
        """Attends as the call does, and returns the new keys and values, for `read`."""
        positions, length = self._positions(x, cache), _length(x, cache)
        x_q, x_new = apart(x, 2)
        q = self._queries(x_q, positions, length)
        new = self.keys_and_values(x_new, positions, length=length)
        if cache.slots == 0:
            o = self._attend_to_input(q, *new, tokens)
        else:
            o, cache = self._attend_to_cache(q, *new, cache, tokens)
        return merge(o, self.w_out, self.b_out), cache, new

    def read(
        self,
        x: Float[Array, "B T D"],
        keys_values: KeysValues,
        before: KeyValueCache,
        written: KeyValueCache,
        tokens: Tokens,
    ) -> Float[Array, "B T D"]:
        """Attends with queries of its own to what `keep` made of the same tokens.

        Args:
          keys_values: the keys and values of these tokens.
          before, written: the cache that `keep` was given, and the one it returned,
            both at its layer.
        """
        positions = self._positions(x, before)
        q = self._queries(x, positions, _length(x, before))
        if before.slots == 0:
            o = self._attend_to_input(q, *keys_values, tokens)
        else:
            o = attend_to_written(
                q, *keys_values, before, written, **self._options(q, tokens)
            )
        return merge(o, self.w_out, self.b_out)

    def write(
        self,
        x: Float[Array, "B T D"],
        cache: KeyValueCache,
        tokens: Tokens,
    ) -> KeyValueCache:
        """Writes the keys and values of tokens that attend to nothing here."""
        new = self.keys_and_values(
            x, self._positions(x, cache), length=_length(x, cache)
        )
        return write(cache, *new, tokens.lengths)

    def through(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        look: Callable[..., Float[Array, "B T H E"]],
    ) -> Float[Array, "B T D"]:
        """Attends where the caller keeps keys and values in a way of its own.

        Args:
          positions: position of each token, in any order.
          look: `look(q, new, *, window, scale, soft_cap, bias) -> o`, with what this
            layer is made of: see `attend_to_cache`.
        """
        x_q, x_new = apart(x, 2)
        q = self._queries(x_q, positions, None)
        new = self.keys_and_values(x_new, positions)
        options = self._options(q, None)
        del options["lengths"]  # every token says for itself whether it is there
        return merge(look(q, new, **options), self.w_out, self.b_out)

    def keys_and_values(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "#B T"],
        *,
        length: int | None = None,
    ) -> KeysValues:
        """Makes the keys and values of tokens that attend to nothing here.

        Args:
          length: see `frequencies`.
        """
        x_k, x_v = apart(x, 2)
        k = project(x_k, self.w_k, self.b_k)
        v = project(x_v, self.w_v, self.b_v)
        k = self._rotate_heads(self._norm_heads(k, self.k_norm), positions, length)
        return KeysValues(k, v)

    def queries_keys_values(
        self, x: Float[Array, "B T D"]
    ) -> tuple[
        Float[Array, "B T H E"], Float[Array, "B T K E"], Float[Array, "B T K E"]
    ]:
        """Returns the queries, keys and values of full rows, for inspection."""
        positions = jnp.arange(x.shape[1])[None]
        k, v = self.keys_and_values(x, positions, length=x.shape[1])
        return self._queries(x, positions, x.shape[1]), k, v

    def values_and_outputs(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T K E"], Float[Array, "B T H E"]]:
        """Returns the values of full rows, and each head's attention output."""
        positions = jnp.arange(x.shape[1])[None]
        k, v = self.keys_and_values(x, positions, length=x.shape[1])
        q = self._queries(x, positions, x.shape[1])
        tokens = Tokens(jnp.zeros(x.shape[:2], jnp.int32))
        return v, self._attend_to_input(q, k, v, tokens)

    def _positions(self, x: Array, cache: KeyValueCache) -> Array:
        # All rows start at 0 in training, so they share one row of positions.
        one_row = jnp.zeros((1, 1), jnp.int32)
        start = one_row if cache.slots == 0 else cache.position[:, None]
        return start + jnp.arange(x.shape[1])  # [1 or B, T]

    def _queries(
        self,
        x: Array,
        positions: Array,
        length: int | None,
    ) -> Array:
        q = project(x, self.w_q, self.b_q)
        return self._rotate_heads(self._norm_heads(q, self.q_norm), positions, length)

    def _norm_heads(self, heads: Array, norm: Norm | None) -> Array:
        if norm is None:
            return heads
        if self.config.qk_norm_over == "full":
            return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)
        return norm(heads)

    def _rotate_heads(
        self, heads: Array, positions: Array, length: int | None
    ) -> Array:
        # Before the cache: a cached key is rotated once, where it was made.
        rope = self.config.position
        if not isinstance(rope, Rope):
            return heads
        return rotate(heads, positions, rope, length=length)

    def _attend_to_input(self, q, k, v, tokens: Tokens) -> Array:
        # All rows start at 0, so distances are differences of indices.
        position = self.config.position
        alibi = isinstance(position, Alibi)
        return attend(
            q,
            k,
            v,
            scale=self._scale(),
            causal=True,
            window=self.window,
            segments=tokens.segments,
            slopes=alibi_slopes(self.config.heads, position) if alibi else None,
            soft_cap=self.config.soft_cap,
            implementation=self.config.implementation,
        )

    def _attend_to_cache(
        self, q, k, v, cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Array, KeyValueCache]:
        if tokens.segments is not None:
            raise NotImplementedError(
                "SelfAttention: segments work with the training cache (length 0) "
                "only: leave them out"
            )
        options = self._options(q, tokens)
        if q.shape[1] <= _FEW or not target.computes_on_few_cores():
            return attend_to_cache(q, k, v, cache, **options)
        written = write(cache, k, v, tokens.lengths)

        def begin() -> Array:
            # In the cache's dtype, so that a text may be cut anywhere.
            new = [x.astype(cache.keys.dtype).astype(q.dtype) for x in (k, v)]
            return self._attend_to_input(q, new[0], new[1], tokens)

        def go_on() -> Array:
            return attend_to_written(q, k, v, cache, written, **options)

        # Prompts that begin here have nothing else in the cache, and causal attention
        # reads half as many keys as attention to the cache through a mask.
        begins = cache.position == 0
        if tokens.lengths is not None:
            begins |= tokens.lengths == 0
        return jax.lax.cond(jnp.all(begins), begin, go_on), written

    def _options(self, q: Array, tokens: Tokens | None) -> dict[str, Any]:
        """Returns the options of attention to a cache."""
        alibi = isinstance(self.config.position, Alibi)
        return {
            "scale": self._scale(),
            "window": self.window,
            "lengths": None if tokens is None else tokens.lengths,
            "soft_cap": self.config.soft_cap,
            "bias": partial(self._bias, dtype=q.dtype) if alibi else None,
        }

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


def _length(x: Array, cache: KeyValueCache) -> int:
    """Returns the tokens of a row in training, else those that the cache has room for.

    A ring has room for its window only: stacks make none where a rope asks for it.
    """
    return cache.slots or x.shape[1]
