"""Weight initialization: one config, one function."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float

from recurjax.ranges import PositiveFloat, RangeChecks
from recurjax.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class InitConfig(RangeChecks):
    """Distribution of the initial weights of linear maps and embeddings.

    The default is GPT-2's (Radford et al. 2019, section 2.3): N(0, 0.02), and the two
    projections that write to the residual stream divided by sqrt(2 L). OLMo's is
    `std=None, truncate=3.0, output="layer"`; nanochat's
    `distribution="uniform", std=None, output="zero"`; RAT's `output="same"`.
    Norm weights start at 1 and biases at 0.

    A small model learns recall early only if a token's embedding starts about as large
    as what one branch writes to the residual stream. A branch reads a normalized state,
    so with `std=None` it writes numbers of at most about 1: use `embedding_std=1.0` and
    an untied head (`UNIT_VARIANCE`). At 0.1 the first branch buries the token that it
    was computed from.

    Attributes:
      distribution: distribution of weights: "normal", or "uniform" on +-sqrt(3) std.
        Embeddings and heads are always normal.
      std: standard deviation of weights; None: 1/sqrt(fan in).
      truncate: draw normal weights within this many standard deviations only, without
        rescaling; None: no limit.
      output: divisor of the std of the attention's and the MLP's output projections:
        "same", 1; "depth", sqrt(2 L); "layer", sqrt(2 (l + 1)) for layer l from 0.
        "zero" starts them at 0.
      embedding_std: standard deviation of embeddings; None: 1/sqrt(D).
      head_std: standard deviation of an untied head; None: `std`.
    """

    distribution: Literal["normal", "uniform"] = "normal"
    std: PositiveFloat | None = 0.02
    truncate: PositiveFloat | None = None
    output: Literal["same", "depth", "layer", "zero"] = "depth"
    embedding_std: PositiveFloat | None = 0.02
    head_std: PositiveFloat | None = None


UNIT_VARIANCE = InitConfig(std=None, embedding_std=1.0)
"""Every embedding starts with variance 1, and so does what a layer computes from it;
outputs are divided by sqrt(2 L). For small models with an untied head: a tied one would
start with logits sqrt(D) times as large."""


def draw_weight(
    key: Array, shape: tuple[int, ...], *, fan_in: int, config: InitConfig
) -> Float[Array, "..."]:
    """Draws one float32 weight with the config's std, or 1/sqrt(fan_in) without one."""
    std = 1.0 / math.sqrt(fan_in) if config.std is None else config.std
    return _draw(key, shape, std, config)


def draw_output_weight(
    key: Array,
    shape: tuple[int, ...],
    *,
    layer: Array | int,
    layers: int,
    config: InitConfig,
) -> Float[Array, "..."]:
    """Draws a weight that writes to the residual stream: see `InitConfig.output`.

    Args:
      shape: D last; all dimensions before it are summed over, and so the fan in.
      layer: the layer's number from 0; may be traced.
      layers: L, the depth of the full stack.
    """
    if config.output == "zero":
        return jnp.zeros(shape, jnp.float32)
    weight = draw_weight(key, shape, fan_in=math.prod(shape[:-1]), config=config)
    if config.output == "depth":
        # Two layers' outputs, attention's and the MLP's, are added to the residual
        # stream at every depth: 2 L of them (GPT-2, section 2.3).
        return weight / math.sqrt(2 * layers)
    if config.output == "layer":
        return weight / jnp.sqrt(jnp.asarray(2 * (layer + 1), jnp.float32))
    return weight


def draw_embedding(
    key: Array, shape: tuple[int, int], *, config: InitConfig
) -> Float[Array, "N D"]:
    """Draws a table of N embeddings of width D."""
    std = config.embedding_std
    std = 1.0 / math.sqrt(shape[1]) if std is None else std
    return _draw(key, shape, std, _normal(config))


def draw_head(
    key: Array, shape: tuple[int, int], *, config: InitConfig
) -> Float[Array, "D V"]:
    """Draws an untied head."""
    if config.head_std is not None:
        return _draw(key, shape, config.head_std, _normal(config))
    return draw_weight(key, shape, fan_in=shape[0], config=_normal(config))


def _normal(config: InitConfig) -> InitConfig:
    return replace(config, distribution="normal")


def _draw(key: Array, shape: tuple[int, ...], std: float, config: InitConfig) -> Array:
    if config.distribution == "uniform":
        # A uniform variable on +-b has the standard deviation b / sqrt(3).
        bound = math.sqrt(3.0) * std
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    if config.truncate is None:
        return std * jax.random.normal(key, shape, jnp.float32)
    bound = config.truncate
    return std * jax.random.truncated_normal(key, -bound, bound, shape, jnp.float32)
