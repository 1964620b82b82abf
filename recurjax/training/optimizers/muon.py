"""Muon with variance reduction and cautious decay, as an optax transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Int
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from recurjax.types import Array

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
    """What Muon remembers of every matrix.

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
    """Returns Muon's whole step, learning rate and decay included.

    m = mu m + (1 - mu) g; u = mu m + (1 - mu) g (Nesterov); o = polar factor of u by
    five Newton-Schulz steps; o is divided by the root of the running mean of its mean
    squares and given its Frobenius norm back; p loses eta (o + lambda p where o p >= 0)
    with eta = rate sqrt(max(1, out / in)). Sources: Jordan et al. 2024 (Muon), Li et
    al. 2025 (NorMuon), Chen et al. 2025 (cautious decay), in nanochat's form.

    Args:
      rate, momentum, decay: step (from 0) -> eta's factor, mu, lambda.
      dimensions: tree of weights -> tree of `MuonDimensionNumbers`; other axes count
        matrices that are independent of each other.
      b2: of the running mean squares.
      dtype: of the Newton-Schulz products; bfloat16 is nanochat's.
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
            raise ValueError("muon: update needs the weights, for their decay")
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
    # Rows that were updated more than others get less, and the matrix as a whole what
    # it had: only the shares change.
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
