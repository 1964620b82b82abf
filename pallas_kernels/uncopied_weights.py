"""Products of a decode step that read an accelerator's weights in place.

One token each of a few rows meets every weight once, so that a copy of a weight costs
more than its product. XLA for GPUs makes such copies to save launches: it joins the
weights of products that read the same array, and it cuts a product along what it sums
over, for which some weights are first taken out of their stack of layers. For TPUs it
widens the weights of a product with one row. The functions here write the products so
that it has no reason to, and `compiler_options` are for programs of decode steps.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from pallas_kernels import target
from pallas_kernels.mesh_cut import row_axes

Array = jax.Array
_ROWS = 8
_LEAST_ROWS = {"gpu": 8, "tpu": 2}
"""Rows from which XLA reads the weights in place, as compiled for an H100 and for
a v5e; fewer are multiplied as eight. A CPU multiplies them as they are."""
_CUT = 64
"""Sums that one of a single group is made of."""
_MANY = 1 << 23
"""Weights from which XLA joins scales of groups to a sum, as compiled for an H100; of
fewer it writes them scaled."""


def pay_off() -> bool:
    """Returns whether XLA would join or copy weights of a few rows: on a GPU."""
    return target.current().platform == "gpu"


def with_more_rows(
    product: Callable[[Array], Array], x: Shaped[Array, "B ..."]
) -> Float[Array, "B ..."]:
    """Computes product(x), of fewer than eight rows as part of a product of eight.

    Of a single row it is a sum to XLA, for which it turns and copies the weights; of
    two to seven it copies some out of their stack, for GPUs. Eight rows read no more
    weights than one, and those are what takes the time of an accelerator.

    Args:
      product: maps each row by itself.
      x: rows of a product, or of ids whose rows of a table it reads.
    """
    B = x.shape[0]
    # Rows on several devices would be sent around.
    least = _LEAST_ROWS.get(target.current().platform, 0)
    if least <= B or row_axes(B):
        return product(x)
    if B == 1:
        more = jnp.broadcast_to(x, (_ROWS, *x.shape[1:]))
    else:
        more = jnp.pad(x, [(0, _ROWS - B)] + [(0, 0)] * (x.ndim - 1))
    return product(more)[:B]


def compiler_options() -> dict[str, str] | None:
    """Returns what a program of decode steps is compiled with; None: the defaults.

    Where each of all layers converts its own integers, XLA for GPUs converts the stack
    first, and writes it as floats at every step.
    """
    return {"xla_disable_hlo_passes": "slice-sinker"} if pay_off() else None


def in_halves(
    x: Float[Array, "B N"], weight: Float[Array, "N M"]
) -> Float[Array, "B M"]:
    """Computes x W in x's dtype as two products, each of half of the inputs.

    In a loop over tokens, XLA for GPUs copies a weight out of its stack of layers for a
    product that it does not cut itself, one with many outputs.
    """
    N, M = weight.shape
    # Inputs cut over devices stay as they are: such a weight narrows.
    if N % 2 or N > M:
        return x @ weight
    halves = jnp.moveaxis(x.reshape(-1, 2, N // 2), 1, 0)
    parts = jnp.einsum(
        "hbn,hnm->hbm",
        halves,
        weight.reshape(2, N // 2, M),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return jnp.sum(parts, axis=0).astype(x.dtype)


def apart(x: Array, products: int) -> tuple[Array, ...]:
    """Gives each of several products that read x an x of its own."""
    # One barrier over all of them: several of x alone are found equal and become one.
    return tuple(jax.lax.optimization_barrier((x,) * products))


def apart_by_layer(x: Array, per_layer: Array) -> Array:
    """Gives a layer an x of its own where products of every layer read one x.

    Args:
      per_layer: what only this layer has: barriers over x alone would become one.
    """
    return jax.lax.optimization_barrier((x, per_layer))[0]


def expands(grouped: bool, rows: int) -> bool:
    """Returns whether XLA would write a weight of integers as floats for a product.

    Args:
      grouped: whether several groups of an output's inputs have a scale each.
      rows: of the product; for a single one, XLA for GPUs expands all.
    """
    one = rows == 1 and pay_off()
    return one or grouped and target.current().platform != "cpu"


def by_groups(
    x: Float[Array, "B N"],
    values: Int[Array, "N M"],
    scales: Float[Array, "G M"],
    offsets: Float[Array, "G M"] | None = None,
) -> Float[Array, "B M"]:
    """Computes x W in float32, where N / G inputs of W share a scale and an offset.

    Scales multiply each group's partial sum, so that a weight is read as integers: as a
    factor of W, XLA writes them repeated over their groups: 8 times int4's bytes.
    Offsets multiply the sum of a group's inputs.
    """
    one = pay_off() and len(x) == 1
    if one and (len(scales) == 1 or values.size >= _MANY):
        y = _of_one_row(x, values, scales)
    else:
        y = with_more_rows(lambda x: _of_groups(x, values, scales), x)
    if offsets is None:
        return y
    inputs = x.reshape(len(x), len(scales), -1)
    return y + jnp.sum(inputs, axis=2, dtype=jnp.float32) @ offsets


def _of_one_row(
    x: Float[Array, "1 N"], values: Array, scales: Array
) -> Float[Array, "1 M"]:
    """Computes the product as a sum over the inputs.

    XLA for GPUs joins to a sum what is summed, and so reads integers in place. A sum
    over one group it would cut itself, for which it may turn the stack of layers.
    """
    (N, M), G = values.shape, len(scales)
    cut = G if G > 1 else math.gcd(N, _CUT)
    terms = x.reshape(cut, -1, 1) * values.reshape(cut, -1, M).astype(jnp.float32)
    if G == 1:
        return jnp.sum(jnp.sum(terms, axis=1), axis=0)[None] * scales
    return jnp.sum(terms * scales[:, None], axis=(0, 1))[None]


def _of_groups(
    x: Float[Array, "B N"], values: Array, scales: Array
) -> Float[Array, "B M"]:
    G, M = scales.shape
    grouped = jnp.moveaxis(x.reshape(len(x), G, -1), 1, 0)
    sums = jnp.einsum(
        "gbn,gnm->gbm",
        grouped,
        values.reshape(G, -1, M).astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(sums * scales[:, None], axis=0)


def merge_by_head(
    y: Float[Array, "B H E"], weight: Float[Array, "H E D"]
) -> Float[Array, "B D"]:
    """Computes the sum over the heads of y[h] W[h], in at least float32.

    Each head's product by itself: cut across the heads, for partial sums, W is copied
    out of its stack of layers; cut between them it is read in place. (Two heads a
    product would halve the partial sums, but XLA gives those products to cuBLAS, for
    which it copies W again.)
    """
    wide = jnp.promote_types(weight.dtype, jnp.float32)

    def product(y: Array) -> Array:
        parts = jnp.einsum("bhe,hed->hbd", y, weight, preferred_element_type=wide)
        return jnp.sum(parts, axis=0)

    return with_more_rows(product, y.astype(weight.dtype))
