"""The Recurrent Transformer's layer at a place of the pattern, with its cache.

Its keys and values come from its own output, so that the MLP is inside the recurrence:
it takes the place of a mixer and its MLP together. Everything that it computes is
`recurjax.variants.recurrent_transformer`'s, one layer a call.
"""

from dataclasses import fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill import RecurrentCache, empty_cache
from recurjax.layers.attention import dropped_slots, read_layer, write_layer
from recurjax.layers.mesh import sequence_shards
from recurjax.types import Array, Tokens
from recurjax.variants.rat import sequence_parallel
from recurjax.variants.rat.config import RatConfig, RecurrentLayerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.recurrent_transformer.block import (
    RecurrentTransformerBlock,
    run_layers,
    spec_of,
)


class RecurrentLayerCache(NamedTuple):
    """Pairs of L stacked layers that run one by one, each with its own progress.

    Attributes:
      keys, values, temporary_keys, temporary_values, source: as in `RecurrentCache`.
      written: how many of a layer's persistent pairs are in its slots.
      position: how many tokens each row has seen.
      layer: which of the stacked layers reads and writes.
    """

    keys: Float[Array, "L B S K E"]
    values: Float[Array, "L B S K E"]
    temporary_keys: Float[Array, "L B open K E"]
    temporary_values: Float[Array, "L B open K E"]
    source: Float[Array, "L B D_or_0"]
    written: Int[Array, "L B"]
    position: Int[Array, " B"]
    layer: Int[Array, ""]

    @property
    def slots(self) -> int:
        """S, the number of tokens that fit."""
        return self.keys.shape[2]


_PAIRS = ("keys", "values", "temporary_keys", "temporary_values", "source")


class RecurrentBlock(RecurrentTransformerBlock):
    """z = RT(x): y = x + s a(x, z before), z = y + s MLP(norm'(y))."""

    def __init__(
        self,
        config: RatConfig,
        *,
        place: RecurrentLayerConfig,
        layer: Array | int,
        rngs: nnx.Rngs,
    ):
        self.place = place
        self.config = as_stack(place, config)
        super().__init__(self.config, layer=layer, rngs=rngs)
        self.memory_scale = memory_scale(config)

    def init_cache(
        self, layers: int, batch: int, length: int, dtype
    ) -> RecurrentLayerCache:
        """Creates an empty cache of `layers` layers for `length` tokens per row."""
        spec = spec_of(self.config, jnp.dtype(dtype).name)
        empty = empty_cache(layers, batch, length, self.config.width, spec)
        return RecurrentLayerCache(
            **{name: getattr(empty, name) for name in _PAIRS},
            written=jnp.zeros((layers, batch), jnp.int32),
            position=empty.position,
            layer=jnp.zeros((), jnp.int32),
        )

    def __call__(
        self, x: Float[Array, "B T D"], cache: RecurrentLayerCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], RecurrentLayerCache]:
        if sequence_shards() > 1:
            sequence_parallel.check(self.place, x.shape[1])
        # The op's form of one layer: stacks of one entry.
        pairs = {
            name: read_layer(getattr(cache, name), cache.layer)[None] for name in _PAIRS
        }
        written = read_layer(cache.written, cache.layer)
        own = RecurrentCache(**pairs, position=cache.position, written=written)
        block = jax.tree.map(lambda w: w[None], self)
        z, own = run_layers(self.config, block, x, own, tokens)
        if cache.slots == 0:
            return z, cache
        return z, _written(cache, own, before=written, tokens=x.shape[1])

    def write(
        self, x: Float[Array, "B T D"], cache: RecurrentLayerCache, tokens: Tokens
    ) -> RecurrentLayerCache:
        """Writes the pairs of tokens that leave x as it is: those of its output."""
        return self(x, cache, tokens)[1]


def _written(
    cache: RecurrentLayerCache,
    own: RecurrentCache,
    *,
    before: Int[Array, " B"],
    tokens: int,
) -> RecurrentLayerCache:
    """Returns the cache with what a call of T tokens has added to its layer's own.

    Of the slots only the new ones are copied: a decode step writes one pair, not all.
    """
    rows = jnp.arange(len(before))[:, None]
    # A step before the call may have left its pair: at most T + 1 are new.
    slot = before[:, None] + jnp.arange(tokens + 1)
    read = jnp.minimum(slot, cache.slots - 1)
    nowhere = dropped_slots(cache.slots, tokens + 1)
    put = jnp.where(slot < own.written[:, None], slot, nowhere)

    def add(stacked: Array, layer: Array) -> Array:
        index = (cache.layer, rows, put)
        new = layer[0][rows, read]
        return stacked.at[index].set(new, mode="drop", unique_indices=True)

    small = ("temporary_keys", "temporary_values", "source")
    arrays = {name: getattr(own, name)[0] for name in small}
    arrays["written"] = own.written
    return cache._replace(
        keys=add(cache.keys, own.keys),
        values=add(cache.values, own.values),
        **{
            name: write_layer(getattr(cache, name), cache.layer, array)
            for name, array in arrays.items()
        },
    )


def as_stack(
    place: RecurrentLayerConfig, config: RatConfig
) -> RecurrentTransformerConfig:
    """Returns the stack of such layers whose norms, MLP, depth and init are `config`'s.

    The depth L counts all layers of the pattern's stack: it scales the branches.
    """
    switches = {field.name: getattr(place, field.name) for field in fields(place)}
    return RecurrentTransformerConfig(
        layers=config.layers,
        width=config.width,
        mlp=config.mlp,
        norm=config.norm,
        init=config.init,
        **switches,
    )


def memory_scale(config: RatConfig) -> nnx.Param | None:
    """Returns a layer's factor of the memory as it starts; None without a memory."""
    return None if config.memory is None else nnx.Param(jnp.float32(0.1))
