"""The MLP's nonlinearity inside Pallas kernels: neither lowering has an erf."""

import math

import jax
import jax.numpy as jnp


def activate(x: jax.Array, name: str) -> jax.Array:
    """Applies the MLP's nonlinearity to float32 values; Triton has no erf."""
    if name == "gelu":
        return 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5)))
    if name == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    if name == "relu_squared":
        positive = jnp.maximum(x, 0.0)
        return positive * positive
    return x * jax.nn.sigmoid(x)


def _erf(x: jax.Array) -> jax.Array:
    """Approximates erf within 1.5e-7: Abramowitz and Stegun, 7.1.26."""
    size = jnp.abs(x)
    u = 1.0 / (1.0 + 0.3275911 * size)
    series = 1.061405429
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * u + coefficient
    value = 1.0 - series * u * jnp.exp(-size * size)
    return jnp.where(x < 0.0, -value, value)
