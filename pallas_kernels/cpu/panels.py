"""Products of a few rows with float32 matrices that a loop multiplies by at each step.

The matrices are laid out once, in panels of 64 columns, which a C++ kernel then reads
in memory order; XLA for CPUs reaches a third of its rate with 8 rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import cpu

_WIDTH = 64
_MOST_ROWS = 64
_LEAST_WEIGHTS = 1 << 12


def serves(weight: Float[Array, "L N M"], *, rows: int) -> bool:
    """Returns whether the kernel multiplies `rows` rows by matrices [L, N, M]."""
    size = weight.shape[1] * weight.shape[2]
    if weight.dtype != jnp.float32 or rows > _MOST_ROWS or size < _LEAST_WEIGHTS:
        return False
    return cpu.serves()


def panels_of(weight: Float[Array, "L N M"]) -> Float[Array, "L P N 64"]:
    """Lays matrices out in P panels of 64 columns, the last one filled with zeros."""
    L, N, M = weight.shape
    P = -(-M // _WIDTH)
    weight = jnp.pad(weight, ((0, 0), (0, 0), (0, P * _WIDTH - M)))
    return jnp.swapaxes(weight.reshape(L, N, P, _WIDTH), 1, 2)


def multiply(
    x: Float[Array, "L B N"], panels: Float[Array, "L P N 64"], *, columns: int
) -> Float[Array, "L B M"]:
    """Multiplies rows by the matrices with M = `columns`, summed in float32.

    The order of a sum does not depend on the number of rows or threads.
    """
    return _multiply(x, panels)[..., :columns]


@jax.custom_jvp
def _multiply(x: Array, panels: Array) -> Array:
    L, B, _ = x.shape
    y = jax.ShapeDtypeStruct((L, B, panels.shape[1] * _WIDTH), jnp.float32)
    return cpu.call("panels", y, x, panels, vmap_method="sequential")


@_multiply.defjvp
def _gradients_by_xla(primals: tuple, tangents: tuple) -> tuple:
    def product(x: Array, panels: Array) -> Array:
        y = jnp.einsum("lbn,lpnc->lbpc", x, panels)
        return y.reshape(*x.shape[:2], -1)

    return jax.jvp(product, primals, tangents)
