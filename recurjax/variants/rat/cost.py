"""What a mixer costs at a sequence length: FLOPs a token, bytes of a row's cache."""

from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from recurjax.layers.initialization import InitConfig
from recurjax.variants.rat.block import make_mixer
from recurjax.variants.rat.config import MixerConfig


class MixerCost(NamedTuple):
    """One layer's mixer, its MLP aside.

    Attributes:
      flops: of training, a token: 6 a weight and 12 H E a key that a position sees.
      cache_bytes: of a row of that length: keys, values and float32 states.
    """

    flops: float
    cache_bytes: int


def mixer_cost(
    mixer: MixerConfig, *, width: int, length: int, dtype: Any = "bfloat16"
) -> MixerCost:
    """Counts a mixer's cost; nothing is allocated.

    Args:
      mixer: its config.
      width: D.
      length: T, in tokens.
      dtype: of the cached keys and values.
    """
    build = partial(make_mixer, mixer, width, InitConfig(), layer=0, layers=1)
    layer: Any = jax.eval_shape(
        lambda key: build(rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    # As shapes: a row of 65,536 tokens is not made to count its bytes.
    cache = jax.eval_shape(lambda: layer.init_cache(1, 1, length, dtype))
    # 12 H E a key: two products forward and four backward, two FLOPs each.
    seen = 12.0 * mixer.heads * mixer.head_width * mixer.seen(length)
    return MixerCost(
        flops=6.0 * mixer.weights(width) + seen,
        cache_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
    )
