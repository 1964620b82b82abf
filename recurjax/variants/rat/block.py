"""One layer: a mixer and an MLP around the residual stream."""

from flax import nnx
from jaxtyping import Float

from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import Mlp
from recurjax.layers.norm import Norm
from recurjax.types import Array, Cache, Tokens
from recurjax.variants.rat.attention_mixer import AttentionMixer
from recurjax.variants.rat.config import (
    AttentionMixerConfig,
    MixerConfig,
    RatConfig,
    RatMixerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
)
from recurjax.variants.rat.rat_mixer import RatMixer
from recurjax.variants.rat.reversed_mixer import ReversedRatMixer
from recurjax.variants.rat.rnn_mixer import RnnMixer

_MIXERS = {
    RatMixerConfig: RatMixer,
    RnnMixerConfig: RnnMixer,
    ReversedRatMixerConfig: ReversedRatMixer,
    AttentionMixerConfig: AttentionMixer,
}


def make_mixer(
    mixer: MixerConfig,
    width: int,
    init: InitConfig,
    *,
    layer: Array | int,
    layers: int,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Builds the module of a mixer's config for layer `layer` of `layers`."""
    # A mixer is known by its config's class, as a stack is.
    build = _MIXERS[type(mixer)]
    return build(mixer, width, init, layer=layer, layers=layers, rngs=rngs)


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
