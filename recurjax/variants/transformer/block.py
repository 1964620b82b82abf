"""One Transformer layer."""

from flax import nnx
from jaxtyping import Float

from recurjax.layers.key_value_cache import KeyValueCache
from recurjax.layers.mlp import Mlp
from recurjax.layers.norm import Norm
from recurjax.layers.self_attention import SelfAttention
from recurjax.types import Array, Tokens
from recurjax.variants.transformer.config import TransformerConfig


class TransformerBlock(nnx.Module):
    """Pre-norm attention and MLP around a residual stream.

    y = x + s Attention(norm(x)), z = y + s MLP(norm'(y)), s = 1 or 1/sqrt(L). Source:
    Vaswani et al. 2017 with the norm in front (Xiong et al. 2020, figure 1b).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        window: int | None,
        layer: Array | int,
        rngs: nnx.Rngs,
    ):
        depth = {"layer": layer, "layers": config.layers}
        D, init = config.width, config.init
        self.parallel = config.parallel_residual
        one = config.residual_scale == "one"
        self.residual_scale = 1.0 if one else config.layers**-0.5
        self.attention_norm = Norm(config.norm, D)
        self.attention = SelfAttention(
            config.attention, D, init, window=window, rngs=rngs, **depth
        )
        self.mlp_norm = Norm(config.norm, D)
        self.mlp = Mlp(config.mlp, D, init, rngs=rngs, **depth)

    def __call__(
        self, x: Float[Array, "B T D"], cache: KeyValueCache, tokens: Tokens
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        mixed, cache = self.attention(self.attention_norm(x), cache, tokens)
        y = x + self.residual_scale * mixed
        source = x if self.parallel else y
        return y + self.residual_scale * self.mlp(self.mlp_norm(source)), cache
