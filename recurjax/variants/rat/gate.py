"""The projections of the gates: full, or of low rank."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from pallas_kernels.gated_scan import GateLogits, gate_of
from recurjax.layers.attention import project_flat
from recurjax.layers.initialization import InitConfig, draw_weight
from recurjax.layers.linear import linear
from recurjax.types import Array
from recurjax.variants.rat.config import gate_bias_span


class Gate(nnx.Module):
    """sigmoid(x W + b), W = W_full or W_reduce W_expand.

    Departs from the paper, which has no b: the authors' code does, and it decides how
    far a fresh recurrence looks back.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        init: InitConfig,
        *,
        rank: int | None,
        horizon: int | None,
        rngs: nnx.Rngs,
    ):
        # A full gate has as many weights as a projection of values; one of low rank,
        # few.
        wide = (heads, head_width)
        draw = partial(draw_weight, config=init)

        def weight(shape: tuple[int, ...], used: bool) -> nnx.Param | None:
            if not used:
                return None
            return nnx.Param(draw(rngs.params(), shape, fan_in=shape[0]))

        self.w_full = weight((width, *wide), rank is None)
        self.w_reduce = weight((width, rank or 0), rank is not None)
        self.w_expand = weight((rank or 0, *wide), rank is not None)
        bias = None if horizon is None else _draw_bias(rngs.params(), wide, horizon)
        self.b_forget = None if bias is None else nnx.Param(bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T I"]:
        """Returns the gate in at least float32."""
        return gate_of(self.logits(x))

    def logits(self, x: Float[Array, "B T D"]) -> GateLogits:
        """Returns what the gate is the sigmoid of: x W in x's dtype, and b."""
        if self.w_full is not None:
            logits = project_flat(x, self.w_full)
        else:
            assert self.w_reduce is not None and self.w_expand is not None
            logits = project_flat(linear(x, self.w_reduce), self.w_expand)
        # Without a bias the gate starts at 1/2 and looks back two tokens.
        bias = None if self.b_forget is None else self.b_forget[...].reshape(-1)
        return GateLogits(logits, bias)


def _draw_bias(key: Array, shape: tuple[int, int], horizon: int) -> Array:
    """Draws log U(1, horizon - 1): gates that span from 2 to `horizon` tokens."""
    # A logit of log(n - 1) is a gate of 1 - 1/n, which looks back about n tokens.
    span = gate_bias_span(horizon)
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=jnp.exp(span)))
