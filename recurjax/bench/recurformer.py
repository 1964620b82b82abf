"""RecurFormer's rows: the selective scan, by every backend that runs here."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation
from pallas_kernels.selective_scan import api, selective_scan
from pallas_kernels.selective_scan.reference import selective_scan_reference
from recurjax.bench.timing import Row, repeat, row

Dtype = Literal["float32", "bfloat16"]

SMALL = {"B": 1, "I": 512, "N": 16}
"""The shapes of a small mixer, for two CPU cores."""

LARGE = {"B": 8, "I": 2048, "N": 16}
"""Those of a large one, for one accelerator."""

SMALL_LENGTHS = (512, 2048, 16384)
LARGE_LENGTHS = (4096, 65536)
REFERENCE_UP_TO = 2048
"""The reference's gradient keeps every state: 32 kB a position at the small shapes."""
_NAME = "selective_scan"


def rows(*, large: bool, dtype: Dtype, repeats: int) -> Iterator[Row]:
    """Measures every backend at every length; decode is one position."""
    shape = LARGE if large else SMALL
    for length in LARGE_LENGTHS if large else SMALL_LENGTHS:
        for name, scan in _scans(length).items():
            yield from _passes(name, scan, shape | {"T": length}, dtype, repeats)
    for name, scan in _scans(1).items():
        yield _decode(name, scan, shape | {"T": 1}, dtype, repeats)


def summary(rows: list[Row]) -> str:
    """Compares the backends with the reference where both were measured."""
    times = {(row.name, row.shape["T"]): row.min_ms for row in rows}
    found = []
    for (name, length), time in times.items():
        what = name.split("/")[-1]
        theirs = times.get((f"{_NAME}/reference/{what}", length))
        if theirs is not None and "/reference/" not in name:
            found.append(f"{name} at T {length} {theirs / time:.1f}")
    return "the reference's time over " + ", ".join(found)


def _scans(length: int) -> dict[str, Callable[..., Any]]:
    """Returns the backends that can run here, by name, and the reference."""
    found: dict[str, Callable[..., Any]] = {}
    if length <= REFERENCE_UP_TO:
        found["reference"] = selective_scan_reference
    shapes = jax.eval_shape(partial(_arrays, SMALL | {"T": 2}, "float32"))
    for name in api.OP.backends:
        scan = partial(selective_scan, implementation=cast(Implementation, name))
        try:
            jax.eval_shape(lambda arrays, scan=scan: scan(**arrays), shapes)
        except NotImplementedError:  # a kernel for a device that is not here
            continue
        found[name] = scan
    return found


def _passes(
    name: str,
    scan: Callable[..., Any],
    sizes: dict[str, int],
    dtype: Dtype,
    repeats: int,
) -> Iterator[Row]:
    arrays = jax.tree.map(jnp.asarray, _arrays(sizes, dtype))

    @jax.jit
    def forward(arrays: dict[str, jax.Array]) -> Any:
        return scan(**arrays)[0]

    @jax.jit
    def both(arrays: dict[str, jax.Array]) -> Any:
        return jax.grad(lambda arrays: jnp.sum(scan(**arrays)[0]))(arrays)

    tokens = sizes["B"] * sizes["T"]
    for what, program in (("forward", forward), ("forward_backward", both)):
        call = partial(program, arrays)
        times = repeat(call, repeats=repeats)
        yield row(f"{_NAME}/{name}/{what}", sizes, dtype, times, tokens=tokens)


def _decode(
    name: str,
    scan: Callable[..., Any],
    sizes: dict[str, int],
    dtype: Dtype,
    repeats: int,
) -> Row:
    arrays = jax.tree.map(jnp.asarray, _arrays(sizes, dtype))
    step = jax.jit(lambda arrays: tuple(scan(**arrays)))
    times = repeat(lambda: step(arrays), repeats=repeats)
    return row(f"{_NAME}/{name}/decode", sizes, dtype, times, tokens=sizes["B"])


def _arrays(sizes: dict[str, int], dtype: str) -> dict[str, np.ndarray]:
    """Returns the inputs of a call as a mixer gives them."""
    draw = np.random.default_rng(0)
    B, T, I, N = (sizes[letter] for letter in "BTIN")

    def normal(*shape: int, dtype: str = dtype) -> np.ndarray:
        return draw.normal(size=shape).astype(jnp.dtype(dtype))

    return {
        "u": normal(B, T, I),
        "dt": normal(B, T, I),
        "a": -np.tile(np.arange(1, N + 1, dtype="float32"), (I, 1)),
        "b": normal(B, T, N),
        "c": normal(B, T, N),
        "skip": np.ones(I, "float32"),
        "z": normal(B, T, I),
        "dt_bias": normal(I, dtype="float32"),
        "initial": np.zeros((B, I, N), "float32"),
    }
