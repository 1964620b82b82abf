"""A machine's FLOP/s of products and memory bandwidth, which bound all benches."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from recurjax.bench.timing import BenchRow, repeat, row

_NAME = "machine"
_WIDTH = 1024
_READ = {"N": 2**16, "M": 2**11}
"""A matrix of 512 MiB in float32, larger than any cache."""


def rows(*, large: bool, dtype: str, repeats: int) -> Iterator[BenchRow]:
    """Times a product of square matrices, and of a matrix and a vector."""
    del large
    square = jnp.ones((_WIDTH, _WIDTH), dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=wide))
    times = repeat(lambda: multiply(square, square), repeats=repeats)
    # The rate of a product of n^3 terms counts n^3 multiply-adds as its tokens.
    yield row(f"{_NAME}/products", {"N": _WIDTH}, dtype, times, tokens=_WIDTH**3)
    matrix, vector = (
        jnp.ones((_READ["N"], _READ["M"]), dtype),
        jnp.ones(_READ["M"], dtype),
    )
    times = repeat(lambda: multiply(matrix, vector), repeats=repeats)
    yield row(f"{_NAME}/read", _READ, dtype, times, tokens=matrix.nbytes)


def summary(rows: list[BenchRow]) -> str:
    """Reports both rates, of the fastest repeat."""
    products, read = rows
    flops = 2 * _WIDTH**3 / products.min_ms / 1e6
    size = _READ["N"] * _READ["M"] * jnp.dtype(read.dtype).itemsize
    return (
        f"{flops:,.0f} GFLOP/s of products, {size / read.min_ms / 1e6:,.1f} GB/s read"
    )
