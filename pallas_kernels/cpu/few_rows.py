"""Products of a few rows with weights of int8 by a C++ kernel: those of a decode step.

The kernel reads a matrix once and widens it in registers. XLA for CPUs widens one
number at a time in a product into which it has fused what makes x, and for several rows
it writes the table of a tied head in float32 first.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from pallas_kernels import cpu

_MOST_ROWS = 8
_LEAST_WEIGHTS = 1 << 16


def serves(x: Array, weight: Array) -> bool:
    """Returns whether the kernel multiplies rows [B, N] by such a matrix."""
    if weight.dtype != jnp.int8 or x.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    few = x.ndim == 2 and x.shape[0] <= _MOST_ROWS and weight.size >= _LEAST_WEIGHTS
    return few and cpu.serves()


def few_rows(
    x: Float[Array, "B N"], weight: Int8[Array, "..."], *, transposed: bool = False
) -> Float[Array, "B M"]:
    """Computes x W, summed in float32, which the result is.

    Args:
      x: rows that `serves` accepts.
      weight: W [N, M].
      transposed: whether it is [M, N] instead.
    """
    return _few_rows(x.astype(jnp.float32), weight, transposed)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _few_rows(x: Array, weight: Array, transposed: bool) -> Array:
    outputs = weight.shape[0 if transposed else 1]
    y = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    options = {"transposed": int(transposed), "vmap_method": "sequential"}
    return cpu.call("few_rows", y, x, weight, **options)


@_few_rows.defjvp
def _gradients_by_xla(transposed: bool, primals: tuple, tangents: tuple) -> tuple:
    def product(x: Array, weight: Array) -> Array:
        wide = weight.astype(jnp.float32)
        return x @ (wide.T if transposed else wide)

    return jax.jvp(product, primals, tangents)
