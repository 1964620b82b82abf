"""The RAT stack: blocks of a mixer and an MLP, a scan over repeats of the pattern."""

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Float

from recurjax.layers.mesh import SEQUENCE_AXIS, refuse_stages
from recurjax.layers.mlp import Mlp
from recurjax.layers.norm import Norm
from recurjax.layers.stack import (
    CacheRows,
    PatternCache,
    layer_states,
    make_blocks,
    run_blocks,
)
from recurjax.types import Array, Cache, Tokens
from recurjax.variants.rat.config import (
    MixerConfig,
    RatConfig,
)
from recurjax.variants.rat.mixers import (
    make_mixer,
)
from recurjax.variants.rat.sequence_parallel import obstacle


class RatBlock(nnx.Module):
    """y = x + Mixer(norm(x)), z = y + MLP(norm'(y))."""

    def __init__(
        self,
        config: RatConfig,
        *,
        mixer: MixerConfig,
        layer: Array | int,
        rngs: nnx.Rngs,
    ):
        # The number of the layer scales its last matrices' init.
        depth = {"layer": layer, "layers": config.layers}
        D, init = config.width, config.init
        self.mixer_norm = Norm(config.norm, D)
        self.mixer = make_mixer(mixer, D, init, rngs=rngs, **depth)
        self.mlp_norm = Norm(config.norm, D)
        self.mlp = Mlp(config.mlp, D, init, rngs=rngs, **depth)

    def __call__(
        self, x: Float[Array, "B T D"], cache: Cache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], Cache]:
        mixed, cache = self.mixer(self.mixer_norm(x), cache, tokens)
        y = x + mixed
        return y + self.mlp(self.mlp_norm(y)), cache


class RatStack(CacheRows, nnx.Module):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern."""

    def __init__(self, config: RatConfig, *, rngs: nnx.Rngs):
        self.config = config

        def block(place: int, layer: Array, rngs: nnx.Rngs) -> RatBlock:
            mixer = config.pattern[place]
            return RatBlock(config, mixer=mixer, layer=layer, rngs=rngs)

        self.blocks = nnx.List(
            make_blocks(
                block, layers=config.layers, pattern=len(config.pattern), rngs=rngs
            )
        )

    def init_cache(self, batch: int, length: int, dtype) -> PatternCache:
        """Creates the cache for `length` tokens per row.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: dtype of keys and values; recurrent states are at least float32.
        """
        repeats = self.config.layers // len(self.config.pattern)
        groups = tuple(
            # Each mixer has a cache of its own kind; the repeats are stacked within it.
            block.mixer.init_cache(repeats, batch, length, dtype)
            for block in self.blocks
        )
        return PatternCache(position=jnp.zeros(batch, jnp.int32), groups=groups)

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Returns why rows of `length` tokens cannot train on a mesh, or None."""
        if reason := refuse_stages(mesh, type(self.config).__name__):
            return reason
        # One part a row is not a cut at all.
        shards = mesh.shape[SEQUENCE_AXIS]
        reason = None if shards == 1 else obstacle(self.config, length, shards)
        return None if reason is None else f"mesh.sequence = {shards}: {reason}"

    def __call__(
        self, x: Float[Array, "B T D"], cache: PatternCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], PatternCache]:
        return run_blocks(
            self.blocks,
            x,
            cache,
            tokens,
            remat=self.config.remat,
            unroll=self.config.unroll,
        )

    def layer_states(
        self, x: Float[Array, "B T D"], tokens: Tokens
    ) -> Iterator[Float[Array, "B T D"]]:
        """Yields what enters the first layer, and what leaves each."""
        cache = self.init_cache(x.shape[0], 0, x.dtype)
        return layer_states(self.blocks, x, cache, tokens)
