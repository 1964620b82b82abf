"""The feed-forward layer, plain or gated."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from pallas_kernels.activations import ACTIVATIONS, Activation
from recurjax.layers.initialization import InitConfig, draw_output_weight, draw_weight
from recurjax.layers.linear import LinearMaps, Maps, apart, linear
from recurjax.ranges import PositiveInt
from recurjax.types import Array

MlpKind = Literal["gelu", "gelu_tanh", "relu_squared", "swiglu", "geglu", "geglu_tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig(LinearMaps):
    """A feed-forward layer.

    Attributes:
      kind: the activation: "gelu" (exact erf), "gelu_tanh" and "relu_squared" (So et
        al. 2021) have two matrices; "swiglu", "geglu" and "geglu_tanh" (Shazeer 2020)
        have three.
      width: F, the hidden width.
      bias: add biases to the linear maps.
    """

    kind: MlpKind = "gelu"
    width: PositiveInt
    bias: bool = False

    @property
    def gated(self) -> bool:
        """Whether a third matrix gates the activations."""
        return self.kind in ("swiglu", "geglu", "geglu_tanh")

    def maps(self, width: int) -> Maps:
        """Returns the sizes (N, M) of its linear maps, by name."""
        inner = (width, self.width)
        gate = {"gate": inner} if self.gated else {}
        return {"up": inner} | gate | {"down": (self.width, width)}

    @property
    def activation(self) -> Activation:
        """The nonlinearity; when gated, of the gate."""
        match self.kind:
            case "swiglu":
                return "silu"
            case "geglu":
                return "gelu"
            case "geglu_tanh":
                return "gelu_tanh"
            case plain:
                return plain


class Mlp(nnx.Module):
    """y = act(x W_up) W_down, or (act(x W_gate) * (x W_up)) W_down when gated."""

    def __init__(
        self,
        config: MlpConfig,
        width: int,
        init: InitConfig,
        *,
        layer: Array | int,
        layers: int,
        rngs: nnx.Rngs,
    ):
        self.config = config
        draw = partial(draw_weight, fan_in=width, config=init)
        # F is the inner width; the gate's matrix has the shape of `up`.
        up, down = (width, config.width), (config.width, width)
        self.w_up = nnx.Param(draw(rngs.params(), up))
        self.w_gate = nnx.Param(draw(rngs.params(), up)) if config.gated else None
        self.w_down = nnx.Param(
            draw_output_weight(
                rngs.params(), down, layer=layer, layers=layers, config=init
            )
        )
        zeros = partial(jnp.zeros, dtype=jnp.float32)
        # Only the gated kinds have a second map from D to F.
        gate_bias = config.bias and config.gated
        self.b_up = nnx.Param(zeros(config.width)) if config.bias else None
        self.b_gate = nnx.Param(zeros(config.width)) if gate_bias else None
        self.b_down = nnx.Param(zeros(width)) if config.bias else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        activation = ACTIVATIONS[self.config.activation]
        x_up, x_gate = apart(x, 2)
        up = linear(x_up, self.w_up, self.b_up)
        if self.w_gate is None:
            hidden = activation(up)
        else:
            gate = linear(x_gate, self.w_gate, self.b_gate)
            hidden = activation(gate) * up
        return linear(hidden, self.w_down, self.b_down)
