"""Rotary, ALiBi and learned position encodings, and where documents begin."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Float64, Int

from recurjax.layers.initialization import InitConfig, draw_embedding
from recurjax.ranges import (
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Range,
    RangeChecks,
    check_ranges,
)
from recurjax.types import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling(RangeChecks):
    """Position interpolation (Chen et al. 2023): every theta_i / factor.

    Attributes:
      factor: divides every theta_i.
    """

    factor: PositiveFloat


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicScaling(RangeChecks):
    """A larger base for sequences beyond the training length ("dynamic NTK").

    base_T = base (factor T / length - factor + 1)^(r / (r - 2)) for T > length tokens.

    Attributes:
      factor: `factor` in the equation above.
      length: the training length, in tokens.
    """

    factor: PositiveFloat
    length: PositiveInt


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling(RangeChecks):
    """Llama 3.1's rule: slow dimensions are slowed down, fast ones stay as they are.

    A dimension is slow if it turns less than `low` times in `length` tokens, and fast
    if it turns more than `high` times. The rule interpolates linearly in between.

    Attributes:
      factor: divides theta_i of slow dimensions.
      low: turns in `length` tokens below which a dimension is slow.
      high: turns in `length` tokens above which a dimension is fast.
      length: the pretraining length, in tokens.
    """

    factor: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    length: PositiveInt

    def __post_init__(self):
        check_ranges(self)
        if self.low >= self.high:
            raise ValueError(
                f"Llama3Scaling: low must be below high, got {self.low} and {self.high}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling(RangeChecks):
    """YaRN (Peng et al. 2023): slow dimensions / factor, by a ramp over dimensions.

    Attributes:
      factor: divides theta_i of slow dimensions.
      length: the pretraining length, in tokens.
      fast: turns in `length` tokens above which a dimension stays as it is.
      slow: turns in `length` tokens below which a dimension is divided by `factor`.
      truncate: round the ends of the ramp between both to integer dimensions.
      amplitude: factor of cosine and sine, so that logits grow by its square.
    """

    factor: PositiveFloat
    length: PositiveInt
    fast: PositiveFloat = 32.0
    slow: PositiveFloat = 1.0
    truncate: bool = True
    amplitude: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LongScaling(RangeChecks):
    """LongRoPE (Ding et al. 2024): theta_i / short_i, or / long_i in long sequences.

    Attributes:
      short: divisors of theta_i in sequences of up to `length` tokens, one per pair of
        dimensions.
      long: divisors of theta_i in longer sequences, one per pair of dimensions.
      length: the pretraining length, in tokens.
      amplitude: factor of cosine and sine.
    """

    short: tuple[PositiveFloat, ...]
    long: tuple[PositiveFloat, ...]
    length: PositiveInt
    amplitude: PositiveFloat = 1.0


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling
"""How a rotary embedding reaches beyond the sequences of pretraining."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope(RangeChecks):
    """Rotary position embedding (Su et al. 2021), the half-split form.

    Attributes:
      base: theta_i = base^(-2i / width), the angle per token of pair i.
      fraction: share of the head width, from the front, that is rotated.
      scaling: rule that changes theta_i for sequences beyond the pretraining length;
        None: none.
    """

    base: Annotated[float, Range(above=1)] = 10000.0
    fraction: PositiveFraction = 1.0
    scaling: RopeScaling | None = None

    @property
    def asks_length(self) -> bool:
        """Whether angles depend on how long the sequence is, not on positions alone."""
        scaling = self.scaling
        by_length = isinstance(scaling, LongScaling) and scaling.short != scaling.long
        return by_length or isinstance(scaling, DynamicScaling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alibi(RangeChecks):
    """Attention with linear biases (Press et al. 2021).

    Attributes:
      max_bias: m in slope_h = 2^(-m (h + 1) / H), the slope of head h, for any H.
    """

    max_bias: PositiveFloat = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedPositions(RangeChecks):
    """A learned embedding per absolute position, added to the stack's input.

    Attributes:
      length: the number of positions; a longer sequence is an error.
    """

    length: PositiveInt


PositionConfig = Rope | Alibi | LearnedPositions
"""A position encoding; a config field of this type may also be None: no positions."""


def longest_sequence(config: PositionConfig | None) -> int | None:
    """Returns the most tokens that positions reach; None: any number."""
    return config.length if isinstance(config, LearnedPositions) else None


def rotate(
    x: Float[Array, "B T H E"],
    positions: Int[Array, "#B T"],
    config: Rope,
    *,
    length: int | None = None,
) -> Float[Array, "B T H E"]:
    """Rotates pairs (x[i], x[i + r/2]) of the first r = fraction * E dimensions.

    y1 = x1 cos(p theta) - x2 sin(p theta);  y2 = x2 cos(p theta) + x1 sin(p theta).
    Angles, sine and cosine are in at least float32. Source: Su et al. 2021, eq. (34),
    in GPT-NeoX's half-split order.

    Args:
      length: see `frequencies`.
    """
    rotary = rotary_width(x.shape[-1], config)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    theta, amplitude = _constants(config, x.shape[-1], length, dtype)
    angles = positions[..., None].astype(dtype) * theta
    table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    if amplitude != 1.0:
        table = amplitude * table
    cos, sin = jnp.split(_once(table)[:, :, None], 2, axis=-1)  # [B, T, 1, r/2]
    # Half-split: dimension i turns with i + r/2, not with its neighbour.
    x1, x2, rest = jnp.split(x, [rotary // 2, rotary], axis=-1)
    y1 = (x1 * cos - x2 * sin).astype(x.dtype)
    y2 = (x2 * cos + x1 * sin).astype(x.dtype)
    return jnp.concatenate([y1, y2, rest], axis=-1)


@cache
def _constants(
    config: Rope, head_width: int, length: int | None, dtype: np.dtype
) -> tuple[np.ndarray, float]:
    """Returns `frequencies` in a dtype.

    One array for queries and keys: a decode step takes constants as arguments, and two
    arrays would be two tables.
    """
    theta, amplitude = frequencies(config, head_width, length=length)
    return theta.astype(dtype), amplitude


def _once(table: Array) -> Array:
    """Keeps XLA on CPU from recomputing a table for every head and half of a head.

    It fuses sine and cosine into what reads them, at ten times the price of the
    rotation, barriers or not. A product by the identity is exact and is never fused.
    """
    identity = jnp.eye(table.shape[-1], dtype=table.dtype)
    return jax.lax.platform_dependent(
        table,
        cpu=lambda table: jnp.matmul(table, identity, precision="highest"),
        default=lambda table: table,
    )


def frequencies(
    config: Rope, head_width: int, *, length: int | None = None
) -> tuple[Float64[np.ndarray, " N"], float]:
    """Returns theta_i of every rotated pair, and what multiplies cosine and sine.

    In float64 by numpy: they are constants, and float32 powers would move the angle of
    a far position visibly.

    Args:
      head_width: E.
      length: tokens that the sequence has, or that its cache has room for; needed where
        the scaling asks for it.

    Raises:
      NotImplementedError: the scaling asks for a length and there is none.
    """
    rotary, scaling = rotary_width(head_width, config), config.scaling
    exponents = -np.arange(0, rotary, 2, dtype=np.float64) / rotary
    if length is None and config.asks_length:
        raise NotImplementedError(
            f"rotate: {type(scaling).__name__} depends on the sequence's "
            "length, which this stack does not pass: use another scaling"
        )
    match scaling:
        case DynamicScaling(factor=factor) if length and length > scaling.length:
            growth = factor * length / scaling.length - factor + 1
            base = config.base * growth ** (rotary / (rotary - 2))
            return base**exponents, 1.0
        case LinearScaling(factor=factor):
            return config.base**exponents / factor, 1.0
        case Llama3Scaling():
            theta = config.base**exponents
            turns = scaling.length * theta / (2 * np.pi)
            mix = (turns - scaling.low) / (scaling.high - scaling.low)
            return _mixed(theta, scaling.factor, np.clip(mix, 0, 1)), 1.0
        case YarnScaling():
            ramp = _yarn_ramp(scaling, config.base, rotary)
            theta = _mixed(config.base**exponents, scaling.factor, 1 - ramp)
            return theta, scaling.amplitude
        case LongScaling():
            is_long = length is not None and length > scaling.length
            factors = scaling.long if is_long else scaling.short
            return config.base**exponents / np.array(factors), scaling.amplitude
        case _:
            return config.base**exponents, 1.0


def _mixed(theta: np.ndarray, factor: float, unscaled: np.ndarray) -> np.ndarray:
    return theta * (unscaled + (1 - unscaled) / factor)


def _yarn_ramp(scaling: YarnScaling, base: float, rotary: int) -> np.ndarray:
    """Returns 0 for pairs that turn fast, 1 for slow ones: Peng et al., section 3.2."""

    def pair_of(turns: float) -> float:
        # The pair that turns so often in `length` tokens, as a fraction.
        wavelength = scaling.length / (turns * 2 * math.pi)
        return rotary * math.log(wavelength) / (2 * math.log(base))

    low, high = pair_of(scaling.fast), pair_of(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    # An empty ramp is a step.
    high = high + 0.001 if low == high else high
    return np.clip((np.arange(rotary // 2) - low) / (high - low), 0, 1)


def rotary_width(head_width: int, config: Rope) -> int:
    """Returns how many of E dimensions are rotated.

    Raises:
      ValueError: they are odd, or the scaling has factors for another number.
    """
    rotary = int(head_width * config.fraction)
    if rotary < 2 or rotary % 2:
        raise ValueError(
            f"rotate: fraction {config.fraction} of head width {head_width} must be an "
            f"even number of dimensions, got {rotary}"
        )
    if isinstance(config.scaling, LongScaling):
        counts = len(config.scaling.short), len(config.scaling.long)
        if set(counts) != {rotary // 2}:
            raise ValueError(
                f"rotate: LongScaling needs {rotary // 2} factors, one for each "
                f"rotated pair, got {counts[0]} and {counts[1]}"
            )
    return rotary


def alibi_slopes(heads: int, config: Alibi) -> np.ndarray:
    """Returns slope_h = 2^(-max_bias (h + 1) / H) for h = 0..H-1, float64."""
    return 2.0 ** (-config.max_bias * np.arange(1, heads + 1, dtype=np.float64) / heads)


def alibi_bias(
    heads: int,
    query_positions: Int[Array, "#B T"],
    key_positions: Int[Array, "#B S"],
    config: Alibi,
    *,
    dtype=jnp.float32,
) -> Float[Array, "#B H T S"]:
    """Returns -slope_h |i - j|, to be added to the logits (0 on the diagonal)."""
    distance = jnp.abs(query_positions[:, :, None] - key_positions[:, None, :])
    slopes = jnp.asarray(alibi_slopes(heads, config), dtype)
    return -slopes[:, None, None] * distance[:, None].astype(dtype)


def learned_positions(
    config: PositionConfig | None, width: int, init: InitConfig, *, rngs: nnx.Rngs
) -> "PositionEmbedding | None":
    """Makes the table of learned positions where a stack's config has one."""
    if not isinstance(config, LearnedPositions):
        return None
    return PositionEmbedding(config, width, init, rngs=rngs)


def with_positions(
    x: Float[Array, "B T D"],
    table: "PositionEmbedding | None",
    position: Int[Array, " B"],
    *,
    training: bool,
) -> Float[Array, "B T D"]:
    """Adds the table's embedding of each token's own position to x, if there is one.

    Args:
      position: tokens that each row has read.
      training: whether the cache keeps nothing: then every row starts at 0.
    """
    if table is None:
        return x
    # In training every row has the same positions, one lookup for all.
    start = jnp.zeros(1, jnp.int32) if training else position
    return table(x, start[:, None] + jnp.arange(x.shape[1]))


def check_cache_length(stack: str, length: int, longest: int | None) -> None:
    """Raises ValueError for a cache of more tokens than there are learned positions.

    `ModelConfig.refuses_length` refuses what a user asks for before it comes here.
    """
    if longest is not None and length > longest:
        raise ValueError(
            f"{stack}: a cache of {length} tokens exceeds the {longest} "
            "learned positions: use a shorter cache"
        )


class PositionEmbedding(nnx.Module):
    """The table of learned absolute positions."""

    def __init__(
        self, config: LearnedPositions, width: int, init: InitConfig, *, rngs: nnx.Rngs
    ):
        self.config = config
        shape = (config.length, width)
        self.w_position = nnx.Param(draw_embedding(rngs.params(), shape, config=init))

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> Float[Array, "B T D"]:
        """Adds each position's embedding; positions beyond the table clamp to its end.

        Raises:
          ValueError: T itself exceeds the table.
        """
        if x.shape[1] > self.config.length:
            raise ValueError(
                f"PositionEmbedding: {x.shape[1]} positions in one call exceed the "
                f"table's {self.config.length}: use shorter rows"
            )
        # Gathered before the cast: the gradient adds up in the table's own float32.
        return x + self.w_position[...][positions].astype(x.dtype)


def document_starts(
    documents: Int[Array, "B T"] | None,
) -> Bool[Array, "B T"] | None:
    """Marks where documents begin, except at the row's first position."""
    if documents is None:
        return None
    begins = documents[:, 1:] != documents[:, :-1]
    return jnp.pad(begins, ((0, 0), (1, 0)))
