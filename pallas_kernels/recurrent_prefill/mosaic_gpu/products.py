"""The layer's products: a program's part of each, and what it finishes of it.

64 columns of a product are `splits` programs' together. Each multiplies its part of the
contracted axis; when all of them have, each adds up the parts of its own columns. A
program so reads 1 / splits of the rows, where one that owned its columns alone would
read them whole: rows read are most of what crosses memory.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.mosaic_gpu.blocks import (
    BY_COLUMN,
    BY_ROW,
    laid_out,
    over_columns,
    over_rows,
    read,
)
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import RING, SIDE, Launch, Share
from pallas_kernels.recurrent_prefill.mosaic_gpu.refs import Refs, TileScratch


class Product(NamedTuple):
    """One of the layer's products, and where its parts lie."""

    order: int  # in the layer: 0 to 3
    share: Share
    weight: Any  # [N, M], in memory
    bias: Any  # [M]
    held: Any  # [V, depth, 64], a program's part of the weight, in shared memory
    finished: Any  # [64, columns], in shared memory

    def group(self, program: Any) -> tuple[Any, Any]:
        """Returns which 64 columns a program works on, and on which part of them."""
        return program // self.share.splits, program % self.share.splits

    def columns(self, program: Any) -> Any:
        """Returns the columns that a program finishes."""
        group, part = self.group(program)
        count = self.share.columns
        return pl.ds(group * SIDE + part * count, count)


class Products(NamedTuple):
    """Of a layer, in their order."""

    out: Product
    up: Product
    down: Product
    pair: Product

    @classmethod
    def of(cls, launch: Launch, refs: Refs) -> "Products":
        layer, held, shares = refs.layer, refs.scratch, launch.shares
        return cls(
            Product(0, shares.out, layer.w_out, layer.b_out, held.w_out, held.out),
            Product(1, shares.up, layer.w_in, layer.b_in, held.w_in, held.up),
            Product(2, shares.down, layer.w_down, layer.b_down, held.w_down, held.down),
            Product(3, shares.pair, layer.w_kv, layer.b_kv, held.w_kv, held.pair),
        )


def hold_weights(products: Products, scratch: TileScratch, program, played) -> None:
    """Copies a program's parts of the weights into its shared memory."""
    for product in products:
        group, part = product.group(program)
        depth = product.share.depth
        rows, columns = pl.ds(part * depth, depth), pl.ds(group * SIDE, SIDE)
        held = product.held.at[played]
        plgpu.copy_gmem_to_smem(product.weight.at[rows, columns], held, scratch.loaded)
        plgpu.barrier_wait(scratch.loaded)


def multiply(
    launch: Launch,
    refs: Refs,
    product: Product,
    rows_of: Callable[..., Any],
    program,
    played,
    *,
    squares: bool,
) -> None:
    """Writes a program's part of a product, and the squares of the rows that it read.

    Args:
      rows_of: (rows, columns) -> where such a block of what is multiplied lies.
      squares: whether a norm stands in front of the product.
    """
    outputs, scratch = refs.outputs, refs.scratch
    blocks, depth = outputs.y.shape[0] // SIDE, product.share.depth
    _, part = product.group(program)
    chunks = depth // SIDE
    total = blocks * chunks
    held = product.held.at[played]

    def fetch(n) -> None:
        rows = pl.ds(n // chunks * SIDE, SIDE)
        columns = pl.ds(part * depth + n % chunks * SIDE, SIDE)
        slot = n % RING
        plgpu.copy_gmem_to_smem(
            rows_of(rows, columns), scratch.ring.at[slot], scratch.arrived.at[slot]
        )

    for n in range(min(RING - 1, total)):
        fetch(jnp.int32(n))

    @pl.loop(0, blocks)
    def _(block):
        rows = pl.ds(block * SIDE, SIDE)

        def accumulate(sum_ref):
            def chunk(c, squared):
                n = block * chunks + c
                slot = n % RING
                plgpu.barrier_wait(scratch.arrived.at[slot])
                weight = held.at[pl.ds(c * SIDE, SIDE)]
                plgpu.wgmma(sum_ref, scratch.ring.at[slot], weight)
                if squares:
                    x = laid_out(launch, scratch.ring[slot]).astype(jnp.float32)
                    squared = squared + x * x
                # The block before this one has been multiplied: its place is free.
                plgpu.wgmma_wait(1)
                pl.when(n + RING - 1 < total)(lambda: fetch(n + RING - 1))
                return squared

            none = jnp.zeros((SIDE, SIDE), jnp.float32) if squares else ()
            squared = jax.lax.fori_loop(0, chunks, chunk, none)
            plgpu.wgmma_wait(0)
            outputs.partial[program, rows, :] = sum_ref[...]
            if squares:
                outputs.squares[program, rows] = jnp.sum(squared, axis=1)

        pl.run_scoped(accumulate, plgpu.ACC((SIDE, SIDE), jnp.float32))


def finish(
    launch: Launch,
    refs: Refs,
    product: Product,
    program,
    use: Callable[..., None],
    *,
    squares: bool,
) -> None:
    """Adds up a program's columns of a product, and hands them on.

    Args:
      use: (rows, columns, result [64, columns]) writes what follows from them.
      squares: whether the rows that were multiplied are to be normalised.
    """
    outputs, share = refs.outputs, product.share
    group, part = product.group(program)
    first = group * share.splits
    own = pl.ds(part * share.columns, share.columns)
    columns = product.columns(program)
    bias = read(launch, product.bias, columns, layout=BY_COLUMN)

    @pl.loop(0, outputs.y.shape[0] // SIDE)
    def _(block):
        rows = pl.ds(block * SIDE, SIDE)
        result = add_up(
            share.splits, lambda n: read(launch, outputs.partial, first + n, rows, own)
        )
        if squares:
            factor = root_mean_square(
                launch,
                *(outputs.squares, first, share.splits, rows),
                *(share.splits * share.depth, launch.spec.norm_eps),
            )
            result = result * over_columns(factor, share.columns)
        use(rows, columns, result + over_rows(bias))


def root_mean_square(
    launch: Launch, sums: Any, first, count: int, rows, width: int, eps: float
) -> Float[Array, " rows"]:
    """Returns each row's factor from `count` programs' sums of squares."""
    squares = add_up(
        count, lambda n: read(launch, sums, first + n, rows, layout=BY_ROW)
    )
    return jax.lax.rsqrt(squares / width + eps)


def add_up(count: int, part: Callable[[Any], Array]) -> Array:
    """Returns part(0) + ... + part(count - 1), up to eight reads on their way."""
    together = math.gcd(count, 8)

    def some(m, total):
        for n in range(together):
            total = total + part(m * together + n)
        return total

    total = part(0)
    for n in range(1, together):
        total = total + part(n)
    if count == together:
        return total
    return jax.lax.fori_loop(1, count // together, some, total)
