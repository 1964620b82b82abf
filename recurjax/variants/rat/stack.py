"""The RAT stack: a scan over repeats of a pattern of blocks, and what a place costs."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Float

from recurjax.layers.mesh import SEQUENCE_AXIS, refuse_stages
from recurjax.layers.mlp import Mlp, MlpConfig
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
    PlaceConfig,
    RatConfig,
    RecurrentLayerConfig,
    mixing_flops,
)
from recurjax.variants.rat.mixers import make_mixer
from recurjax.variants.rat.recurrent_layer import RecurrentBlock, memory_scale
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
        self.memory_scale = memory_scale(config)

    def __call__(
        self, x: Float[Array, "B T D"], cache: Cache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], Cache]:
        mixed, cache = self.mixer(self.mixer_norm(x), cache, tokens)
        y = x + mixed
        return y + self.mlp(self.mlp_norm(y)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype) -> Cache:
        """Creates the mixer's empty cache for `layers` layers."""
        return self.mixer.init_cache(layers, batch, length, dtype)

    def write(self, x: Float[Array, "B T D"], cache: Cache, tokens: Tokens) -> Cache:
        """Lets the mixer's state take tokens in that do not run the layer."""
        return self.mixer(self.mixer_norm(x), cache, tokens)[1]


class RatStack(CacheRows, nnx.Module):
    """L blocks; `blocks[p]` stacks the layers p, p + P, p + 2P, ... of a P-pattern."""

    def __init__(self, config: RatConfig, *, rngs: nnx.Rngs):
        self.config = config

        build, places = partial(make_block, config), len(config.pattern)
        self.blocks = nnx.List(
            make_blocks(build, layers=config.layers, pattern=places, rngs=rngs)
        )

    def init_cache(self, batch: int, length: int, dtype) -> PatternCache:
        """Creates the cache for `length` tokens per row.

        Args:
          length: 0 for the training cache, which keeps nothing.
          dtype: dtype of keys and values; recurrent states are at least float32.
        """
        repeats = self.config.layers // len(self.config.pattern)
        return empty_cache(self.blocks, repeats, batch, length, dtype)

    def refuses(self, mesh: Mesh | AbstractMesh, length: int) -> str | None:
        """Returns why rows of `length` tokens cannot train on a mesh, or None."""
        return refuse_mesh(self.config, mesh, length)

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


def make_block(
    config: RatConfig, number: int, layer: Array, rngs: nnx.Rngs
) -> RatBlock | RecurrentBlock:
    """Makes a layer of a place of the pattern."""
    place = config.pattern[number]
    if isinstance(place, RecurrentLayerConfig):
        return RecurrentBlock(config, place=place, layer=layer, rngs=rngs)
    return RatBlock(config, mixer=place, layer=layer, rngs=rngs)


def empty_cache(
    blocks: Iterable[Any], entries: int, batch: int, length: int, dtype
) -> PatternCache:
    """Creates a cache with as many entries for each place of the pattern."""
    groups = tuple(
        # Each place has a cache of its own kind; the entries are stacked within it.
        block.init_cache(entries, batch, length, dtype)
        for block in blocks
    )
    return PatternCache(position=jnp.zeros(batch, jnp.int32), groups=groups)


def refuse_mesh(
    config: RatConfig, mesh: Mesh | AbstractMesh, length: int
) -> str | None:
    """Returns why rows of `length` tokens cannot train on a mesh, or None."""
    if reason := refuse_stages(mesh, type(config).__name__):
        return reason
    # One part a row is not a cut at all.
    shards = mesh.shape[SEQUENCE_AXIS]
    reason = None if shards == 1 else obstacle(config, length, shards)
    return None if reason is None else f"mesh.sequence = {shards}: {reason}"


class MixerCost(NamedTuple):
    """The cost of one place of the pattern without its MLP.

    Attributes:
      flops: training FLOPs per token: see `mixing_flops`.
      cache_bytes: bytes of a row's cache of that length: keys, values and float32
        states.
    """

    flops: float
    cache_bytes: int


def mixer_cost(
    mixer: PlaceConfig, *, width: int, length: int, dtype: Any = "bfloat16"
) -> MixerCost:
    """Counts a mixer's cost; nothing is allocated.

    Args:
      mixer: its config.
      width: D.
      length: T, in tokens.
      dtype: dtype of the cached keys and values.
    """
    config = RatConfig(
        layers=1, width=width, pattern=(mixer,), mlp=MlpConfig(width=width)
    )
    one: Any = jax.eval_shape(
        lambda key: RatStack(config, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    # As shapes: a row of 65,536 tokens is not made to count its bytes.
    [cache] = jax.eval_shape(lambda: one.init_cache(1, length, dtype)).groups
    return MixerCost(
        flops=mixing_flops(mixer, width, length),
        cache_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
    )
