"""The additions of low rank that tell the depths of a shared block apart."""

import jax.numpy as jnp
from flax import nnx

from recurjax.layers.attention import AttentionAdditions
from recurjax.layers.initialization import InitConfig, draw_weight
from recurjax.layers.linear import LowRank
from recurjax.layers.mlp import MlpAdditions
from recurjax.variants.relaxed_recursive_transformer.config import (
    RelaxedRecursiveTransformerConfig,
    linear_maps,
)
from recurjax.variants.transformer.block import BlockAdditions


class Adapter(nnx.Module):
    """x W becomes x W + (x A) B; starts as nothing: A is drawn, B is zero."""

    def __init__(
        self, sizes: tuple[int, int], rank: int, init: InitConfig, *, rngs: nnx.Rngs
    ):
        inputs, outputs = sizes
        # No matrix has a higher rank than its smaller side.
        rank = min(rank, inputs, outputs)
        w_reduce = draw_weight(
            rngs.params(), (inputs, rank), fan_in=inputs, config=init
        )
        self.w_reduce = nnx.Param(w_reduce)
        # B at zero: every depth starts as the shared block itself.
        self.w_expand = nnx.Param(jnp.zeros((rank, outputs), jnp.float32))

    def low_rank(self) -> LowRank:
        """Returns A and B as the layers take them."""
        return LowRank(self.w_reduce[...], self.w_expand[...])


class BlockAdapters(nnx.Module):
    """One depth's adapters: one for each linear map of a Transformer layer."""

    def __init__(self, config: RelaxedRecursiveTransformerConfig, *, rngs: nnx.Rngs):
        # Every linear map of the layer, by the name that its adapter has.
        maps = linear_maps(config.transformer)

        def adapter(name: str) -> Adapter:
            return Adapter(maps[name], config.rank, config.init, rngs=rngs)

        self.q = adapter("q")
        self.k = adapter("k")
        self.v = adapter("v")
        self.out = adapter("out")
        self.up = adapter("up")
        # A plain MLP has no gate, and so no adapter for one.
        self.gate = adapter("gate") if "gate" in maps else None
        self.down = adapter("down")

    def additions(self) -> BlockAdditions:
        """Returns them as a block takes them."""
        gate = None if self.gate is None else self.gate.low_rank()
        return BlockAdditions(
            attention=AttentionAdditions(
                q=self.q.low_rank(),
                k=self.k.low_rank(),
                v=self.v.low_rank(),
                out=self.out.low_rank(),
            ),
            mlp=MlpAdditions(
                up=self.up.low_rank(), gate=gate, down=self.down.low_rank()
            ),
        )
