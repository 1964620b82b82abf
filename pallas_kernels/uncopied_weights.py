"""Products of a decode step that read a GPU's weights where they lie.

One token each of a few rows meets every weight once, so that a copy of a weight costs
more than its product. XLA for GPUs makes such copies to save launches: it joins the
weights of products that read the same array, and it cuts a product along what it sums
over, for which some weights are first taken out of their stack of layers. The functions
here write the products so that it has no reason to.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels import target

Array = jax.Array


def pay_off(rows: int) -> bool:
    """Returns whether XLA would copy weights to multiply so many rows by them.

    A single row's products are sums, not matrix products, to XLA: it joins none.
    """
    return rows > 1 and target.current().platform == "gpu"


def apart(x: Array, products: int) -> tuple[Array, ...]:
    """Gives each of several products that read x an x of its own."""
    # One barrier over all of them: several of x alone are found equal and become one.
    return tuple(jax.lax.optimization_barrier((x,) * products))


def apart_by_layer(x: Array, own: Array) -> Array:
    """Gives a layer an x of its own where products of every layer read one x.

    Args:
      own: what only this layer has: barriers over x alone would become one.
    """
    return jax.lax.optimization_barrier((x, own))[0]


def merge_by_head(
    y: Float[Array, "B H E"], weight: Float[Array, "H E D"]
) -> Float[Array, "B D"]:
    """Computes the sum over the heads of y[h] W[h], in at least float32.

    Each head's product by itself: cut across the heads, for partial sums, W is copied
    out of its stack of layers; cut between them it is read where it lies. (Two heads a
    product would halve the partial sums, but XLA gives those products to cuBLAS, for
    which it copies W again.)
    """
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    y = y.astype(weight.dtype)
    parts = jnp.einsum("bhe,hed->hbd", y, weight, preferred_element_type=wide)
    return jnp.sum(parts, axis=0)
