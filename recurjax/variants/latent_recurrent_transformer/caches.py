"""What tokens leave behind: a buffer of a whole sequence, a cache for decoding."""

from typing import NamedTuple

from jaxtyping import Float, Int

from recurjax.layers.attention import KeyValueCache
from recurjax.types import Array
from recurjax.variants.latent_recurrent_transformer.places import Buffer


class LatentBuffer(NamedTuple):
    """What all positions of a sequence have left behind.

    Attributes:
      groups: keys and values, one for each place in the layer pattern, [R, B, T, K, E].
      states: of the source layer, what later tokens receive as memory.
    """

    groups: tuple[Buffer, ...]
    states: Float[Array, "B T D"]


class LatentCache(NamedTuple):
    """Where the rows stand, keys and values, and the last states, newest first."""

    position: Int[Array, " B"]
    groups: tuple[KeyValueCache, ...]
    states: Float[Array, "B N D"]


class Output(NamedTuple):
    """What a pass makes: the last layer's output, the source state, the places."""

    x: Float[Array, "B n D"]
    state: Float[Array, "B n D"]
    places: tuple
