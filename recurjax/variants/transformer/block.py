"""One Transformer layer."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Float, Int

from recurjax.layers.attention import (
    KeysValues,
    KeyValueCache,
    SelfAttention,
)
from recurjax.layers.mlp import Mlp
from recurjax.layers.norm import Norm
from recurjax.layers.stack import residual_scale
from recurjax.types import Array, Tokens
from recurjax.variants.transformer.config import LayerKind, TransformerConfig


class ResidualBlock(nnx.Module):
    """The parts of a layer around its attention: norms, MLP and residual stream.

    A subclass makes `attention` and `mlp`.
    """

    mlp: Mlp

    def __init__(self, config: TransformerConfig):
        # Plain numbers, no parameters: they shape the program and are not trained.
        self.parallel = config.parallel_residual
        self.residual_scale = residual_scale(config.residual_scale, config.layers)

        def norm(side: str) -> Norm | None:
            is_there = config.norms in (side, "both")
            return Norm(config.norm, config.width) if is_there else None

        self.attention_norm, self.mlp_norm = norm("before"), norm("before")
        self.attention_post_norm, self.mlp_post_norm = norm("after"), norm("after")

    def attention_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns what the layer's attention reads of the residual stream."""
        return _normed(self.attention_norm, x)

    def add(
        self,
        x: Float[Array, "B T D"],
        mixed: Float[Array, "B T D"],
    ) -> Float[Array, "B T D"]:
        """Adds both branches to the residual stream.

        Args:
          x: what entered the layer.
          mixed: what its attention made of it.
        """
        # In parallel both branches read x, and their products can be made as one.
        y = x + self.residual_scale * _normed(self.attention_post_norm, mixed)
        read = _normed(self.mlp_norm, x if self.parallel else y)
        fed = _normed(self.mlp_post_norm, self.mlp(read))
        return y + self.residual_scale * fed


def _normed(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class TransformerBlock(ResidualBlock):
    """Attention and MLP around a residual stream.

    y = x + s Attention(norm(x)), z = y + s MLP(norm'(y)), s = 1 or 1/sqrt(L). Source:
    Vaswani et al. 2017 with the norm in front (Xiong et al. 2020, figure 1b). With
    norms "after", y = x + s norm(Attention(x)), and so on; with "both", norms on both
    sides.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        kind: LayerKind,
        layer: Array | int,
        rngs: nnx.Rngs,
    ):
        super().__init__(config)
        depth = {"layer": layer, "layers": config.layers}
        D, init = config.width, config.init
        self.attention = SelfAttention(
            config.attention_of(kind), D, init, window=kind.window, rngs=rngs, **depth
        )
        self.mlp = Mlp(config.mlp, D, init, rngs=rngs, **depth)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: KeyValueCache,
        tokens: Tokens,
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        x, cache, _ = self.keep(x, cache, tokens)
        return x, cache

    def keep(
        self,
        x: Float[Array, "B T D"],
        cache: KeyValueCache,
        tokens: Tokens,
    ) -> tuple[Float[Array, "B T D"], KeyValueCache, KeysValues]:
        """Runs the layer, and hands its keys and values on: see `SelfAttention`."""
        mixed, cache, new = self.attention.keep(self.attention_input(x), cache, tokens)
        # Keys and values go on to who reads them again: a deeper loop.
        return self.add(x, mixed), cache, new

    def read(
        self,
        x: Float[Array, "B T D"],
        keys_values: KeysValues,
        before: KeyValueCache,
        written: KeyValueCache,
        tokens: Tokens,
    ) -> Float[Array, "B T D"]:
        """Runs the layer on keys and values that an earlier run of it has made."""
        mixed = self.attention.read(
            self.attention_input(x),
            keys_values,
            before,
            written,
            tokens,
        )
        return self.add(x, mixed)

    def write(
        self,
        x: Float[Array, "B T D"],
        cache: KeyValueCache,
        tokens: Tokens,
    ) -> KeyValueCache:
        """Writes the keys and values of tokens that do not run the layer."""
        normed = self.attention_input(x)
        return self.attention.write(normed, cache, tokens)

    def through(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        look: Callable[..., Float[Array, "B T H E"]],
    ) -> Float[Array, "B T D"]:
        """Runs the layer on keys that the caller keeps: see `SelfAttention.through`."""
        normed = self.attention_input(x)
        mixed = self.attention.through(normed, positions, look)
        return self.add(x, mixed)

    def keys_and_values(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> KeysValues:
        """Makes the keys and values of tokens that do not run the layer."""
        normed = self.attention_input(x)
        return self.attention.keys_and_values(normed, positions)
