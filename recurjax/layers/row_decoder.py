"""All tokens of a row from one state: the decoder of MAD's compression task.

    y[t] = act(norm(act(norm(z + p[t]) W_1 + b_1)) W_2 + b_2)

with z the state that the stack leaves at the last place, p sinusoidal positions, act
the exact GELU; the model's own final norm and head read y. Source: Poli et al. 2024 and
the public `AutoEncoder`, whose head has a bias besides.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from recurjax.layers.initialization import InitConfig, draw_weight
from recurjax.layers.linear import linear
from recurjax.layers.norm import Norm, NormConfig
from recurjax.types import Array


def sinusoids(length: int, width: int) -> Float[Array, "T D"]:
    """Returns sines, then cosines, of t / 10000^(i / (D/2 - 1)); an odd D ends with 0.

    Source: Vaswani et al. 2017, section 3.5, in fairseq's order.
    """
    half = width // 2
    rates = jnp.exp(jnp.arange(half) * (-math.log(10_000) / max(1, half - 1)))
    angles = jnp.arange(length)[:, None] * rates
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    return jnp.pad(table, ((0, 0), (0, width - 2 * half)))


class RowDecoder(nnx.Module):
    """y = act(norm_2(act(norm_1(z + p) W_1 + b_1)) W_2 + b_2), for every place."""

    def __init__(
        self, width: int, norm: NormConfig, init: InitConfig, *, rngs: nnx.Rngs
    ):
        draw = partial(draw_weight, shape=(width, width), fan_in=width, config=init)
        self.first_norm, self.second_norm = Norm(norm, width), Norm(norm, width)
        self.w_first = nnx.Param(draw(rngs.params()))
        self.w_second = nnx.Param(draw(rngs.params()))
        self.b_first = nnx.Param(jnp.zeros(width, jnp.float32))
        self.b_second = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, z: Float[Array, "B D"], length: int) -> Float[Array, "B T D"]:
        """Returns the input of the final norm and the head for `length` positions."""
        places = sinusoids(length, z.shape[-1]).astype(z.dtype)
        act = partial(jax.nn.gelu, approximate=False)
        y = self.first_norm(z[:, None] + places)
        y = self.second_norm(act(linear(y, self.w_first, self.b_first)))
        return act(linear(y, self.w_second, self.b_second))
