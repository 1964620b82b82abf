"""MuonAdamW: Muon for matrices, AdamW with rates of their own for the rest."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Int
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from recurjax.parameters import parameter_name, rule_of
from recurjax.ranges import (
    DecayRate,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    RangeChecks,
)
from recurjax.types import Array

_REFERENCE_WIDTH, _REFERENCE_BATCH, _REFERENCE_LAYERS = 768, 2**19, 12
_BETAS = (0.8, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonAdamW(RangeChecks):
    """Muon and AdamW together, with nanochat's groups and scaling rules.

    Every rate follows the schedule and is multiplied by sqrt(tokens per batch / 2^19);
    the embeddings' and the head's also by (D / 768)^-1/2. Only Muon's matrices decay,
    by weight_decay (12 / L)^2, which falls linearly to 0 over the run. AdamW's betas
    are (.8, .95), those of the input scales (.96, .95), and eps is 1e-10. Batch, D and
    L are those of the run (`RunSize`).

    Attributes:
      learning_rate: peak learning rate of matrices: all weights but those named below.
      embedding_rate: peak learning rate of token, value and position embeddings.
      head_rate: peak learning rate of an untied head.
      scalar_rate: peak learning rate of norms, biases and scales; residual scales have
        a hundredth of it.
      weight_decay: weight decay of the matrices, before its scaling by depth.
      momentum: Muon's momentum at the first step and from `momentum_steps` on, with a
        linear rise in between.
      momentum_steps: steps until Muon's momentum has its final value.
      dtype: dtype of Muon's Newton-Schulz matrix products.
    """

    learning_rate: PositiveFloat = 0.02
    embedding_rate: PositiveFloat = 0.3
    head_rate: PositiveFloat = 0.004
    scalar_rate: PositiveFloat = 0.5
    weight_decay: NonNegativeFloat = 0.2
    momentum: tuple[DecayRate, DecayRate] = (0.85, 0.95)
    momentum_steps: PositiveInt = 300
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def reads_steps(self) -> bool:
        """Whether there is a weight decay, which goes to 0 over the full run."""
        return self.weight_decay > 0


class RunSize(NamedTuple):
    """The sizes by which MuonAdamW scales its rates and its decay.

    Attributes:
      width: D of the model.
      layers: L of the model.
      tokens: in a batch, over all devices and accumulation parts.
    """

    width: int = _REFERENCE_WIDTH
    layers: int = _REFERENCE_LAYERS
    tokens: int = _REFERENCE_BATCH


def muon_adamw(
    config: MuonAdamW, rate: Callable, *, steps: int, size: RunSize
) -> optax.GradientTransformation:
    """Returns the complete update of every parameter, each by its group.

    Args:
      config: rates and scaling.
      rate: step (from 0) -> scheduled `learning_rate`; the others are in proportion.
      steps: steps of the full run, over which the weight decay falls to 0.
      size: size of the run; `RunSize()` leaves every rate unscaled.
    """
    # A batch k times as large has a gradient with 1/k of the noise: rates grow by sqrt
    # k.
    batch = (size.tokens / _REFERENCE_BATCH) ** 0.5
    # Embeddings and the head learn slower in wider models.
    wide = batch * (size.width / _REFERENCE_WIDTH) ** -0.5

    def scheduled(peak: float) -> Callable:
        # One schedule for all groups: its shape times each group's own peak.
        return lambda step: rate(step) * (peak / config.learning_rate)

    def adam(peak: float, b1: float = _BETAS[0]) -> optax.GradientTransformation:
        moments = optax.scale_by_adam(b1=b1, b2=_BETAS[1], eps=1e-10)
        return optax.chain(moments, optax.scale_by_learning_rate(scheduled(peak)))

    # Decay falls with the square of the depth, as in nanochat.
    depth = (_REFERENCE_LAYERS / size.layers) ** 2
    matrices = muon(
        scheduled(config.learning_rate * batch),
        momentum=optax.linear_schedule(*config.momentum, config.momentum_steps),
        decay=optax.linear_schedule(config.weight_decay * depth, 0.0, steps),
        dimensions=matrix_dimensions,
        dtype=jnp.dtype(config.dtype),
    )
    transforms: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices,
        "embedding": adam(config.embedding_rate * wide),
        "head": adam(config.head_rate * wide),
        "scalar": adam(config.scalar_rate * batch),
        "residual": adam(config.scalar_rate * batch / 100),
        "input": adam(config.scalar_rate * batch, b1=0.96),
    }
    return optax.partition(transforms, parameter_groups)


def parameter_groups(parameters: Any) -> Any:
    """Returns each parameter's group, by its name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: rule_of(parameter_name(path)).group, parameters
    )


def matrix_dimensions(weights: Any) -> Any:
    """Returns which axes of each weight are inputs and outputs; layers stack before."""

    def of_leaf(path: tuple[Any, ...], weight: Any) -> MuonDimensionNumbers:
        rule = rule_of(parameter_name(path))
        # Leading axes count layers or loops: one matrix each.
        first = weight.ndim - len(rule.spec)
        return MuonDimensionNumbers(
            reduction_axis=tuple(range(first, first + rule.inputs)),
            output_axis=tuple(range(first + rule.inputs, weight.ndim)),
        )

    return jax.tree_util.tree_map_with_path(of_leaf, weights)


POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""(a, b, c) of five steps X <- a X + (b A + c A A) X, A = X X^T.

Source: Amsel et al. 2025 (Polar Express), as nanochat has them.
"""

_SAFETY = 1.02  # X / (1.02 |X|_F + 1e-6): singular values stay below 1.
_SMALLEST = 1e-10


class MuonState(NamedTuple):
    """Muon's state of every matrix.

    Attributes:
      count: steps so far.
      momentum: running mean of the gradient.
      second: running mean of the orthogonal update's mean squares, one for each output
        of a matrix at least as wide as it is deep, one for each input of another; axes
        summed over have size 1.
    """

    count: Int[Array, ""]
    momentum: Any
    second: Any


def muon(
    rate: Callable,
    *,
    momentum: Callable,
    decay: Callable,
    dimensions: Callable[[Any], Any],
    b2: float = 0.95,
    dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Returns Muon's complete step, learning rate and decay included.

    m = mu m + (1 - mu) g; u = mu m + (1 - mu) g (Nesterov); o = polar factor of u by
    five Newton-Schulz steps; o is divided by the root of the running mean of its mean
    squares and given its Frobenius norm back; p loses eta (o + lambda p where o p >= 0)
    with eta = rate sqrt(max(1, out / in)). Sources: Jordan et al. 2024 (Muon), Li et
    al. 2025 (NorMuon), Chen et al. 2025 (cautious decay), in nanochat's form.

    Args:
      rate, momentum, decay: step (from 0) -> eta's factor, mu, lambda.
      dimensions: tree of weights -> tree of `MuonDimensionNumbers`; other axes count
        matrices that are independent of each other.
      b2: decay rate of the running mean squares.
      dtype: dtype of the Newton-Schulz products; bfloat16 is nanochat's.
    """

    def init(weights: Any) -> MuonState:
        def second(weight: Array, axes: MuonDimensionNumbers) -> Array:
            shape = list(weight.shape)
            for axis in _averaged(weight, axes):
                shape[axis] = 1
            return jnp.zeros(shape, jnp.float32)

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        seconds = jax.tree.map(second, weights, dimensions(weights))
        return MuonState(jnp.zeros((), jnp.int32), zeros, seconds)

    def update(gradients: Any, state: MuonState, weights: Any = None):
        if weights is None:
            raise ValueError("muon: update needs params, for the weight decay")
        step = state.count
        mu, eta, decays = momentum(step), rate(step), decay(step)
        first = jax.tree.map(
            lambda m, g: m + (1 - mu) * (g - m), state.momentum, gradients
        )

        # Nesterov: the step is taken from where the momentum leads, not from where it
        # was.
        ahead = jax.tree.map(lambda g, m: g + mu * (m - g), gradients, first)
        axes = dimensions(weights)
        # All singular values become about 1: every direction of a matrix learns at one
        # speed.
        rotations = _polar_factors(ahead, axes, dtype)
        second = jax.tree.map(
            lambda o, v, a: v + (1 - b2) * (_mean_square(o, a) - v),
            rotations,
            state.second,
            axes,
        )

        def change(o: Array, v: Array, w: Array, a: MuonDimensionNumbers) -> Array:
            o = _equalized(o, v, a)
            inputs, outputs = _sizes(w, a)
            # Cautious decay: a weight shrinks only where the update shrinks it as well.
            aligned = (o * w >= 0).astype(o.dtype)
            return -eta * max(1.0, outputs / inputs) ** 0.5 * (o + decays * w * aligned)

        changes = jax.tree.map(change, rotations, second, weights, axes)
        return changes, MuonState(step + 1, first, second)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _polar_factors(u: Any, axes: Any, dtype: Any) -> Any:
    # optax divides by |X|_F + eps; the first step's polynomial in X / 1.02 is one in X.
    a, b, c = POLAR_EXPRESS[0]
    first = (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
    # Without momentum of its own it has no state worth keeping.
    orthogonalize = scale_by_muon(
        (first, *POLAR_EXPRESS[1:]),
        beta=0.0,
        nesterov=False,
        eps=1e-6 / _SAFETY,
        # A function: a tree that is a module could be called, and would be.
        weight_dimension_numbers=lambda _: axes,
    )
    low = jax.tree.map(lambda x: x.astype(dtype), u)
    # Only the products run in `dtype`; momentum and weights keep theirs.
    factors, _ = orthogonalize.update(low, orthogonalize.init(low))
    return jax.tree.map(lambda o, x: o.astype(x.dtype), factors, u)


def _equalized(o: Array, v: Array, axes: MuonDimensionNumbers) -> Array:
    """Divides o by sqrt(v) and restores each matrix's Frobenius norm."""
    # Scale down rows that were updated more than others, and keep the matrix' norm.
    scale = jax.lax.rsqrt(jnp.maximum(v, _SMALLEST))
    both = (*_tuple(axes.reduction_axis), *_tuple(axes.output_axis))
    squares = _mean_square(o, axes)
    norm = jnp.sqrt(squares.sum(both, keepdims=True))
    scaled = jnp.sqrt((squares * scale**2).sum(both, keepdims=True))
    count = _averaged_size(o, axes) ** 0.5
    return o * scale * (norm * count / jnp.maximum(scaled * count, _SMALLEST))


def _mean_square(o: Array, axes: MuonDimensionNumbers) -> Array:
    return jnp.mean(jnp.square(o), axis=_averaged(o, axes), keepdims=True)


def _averaged(weight: Array, axes: MuonDimensionNumbers) -> tuple[int, ...]:
    inputs, outputs = _sizes(weight, axes)
    # Over the shorter side: each output, or each input, then has a mean of its own.
    return _tuple(axes.reduction_axis if outputs >= inputs else axes.output_axis)


def _averaged_size(weight: Array, axes: MuonDimensionNumbers) -> int:
    return _product(weight, _averaged(weight, axes))


def _sizes(weight: Array, axes: MuonDimensionNumbers) -> tuple[int, int]:
    inputs = _product(weight, _tuple(axes.reduction_axis))
    return inputs, _product(weight, _tuple(axes.output_axis))


def _product(weight: Array, axes: tuple[int, ...]) -> int:
    size = 1
    for axis in axes:
        size *= weight.shape[axis]
    return size


def _tuple(axes: Any) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)
