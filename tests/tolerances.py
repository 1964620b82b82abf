"""How close is close: one table by dtype, relative to the largest value expected."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


class Tolerance(NamedTuple):
    """Largest error as a share of the largest expected value of the same array."""

    value: float
    gradient: float


TOLERANCES = {
    "float64": Tolerance(value=1e-12, gradient=1e-10),
    "float32": Tolerance(value=2e-5, gradient=1e-4),
    "bfloat16": Tolerance(value=2e-2, gradient=4e-2),
}


def assert_values_close(got: Any, want: Any, dtype: str = "float32") -> None:
    """Compares trees within the table's tolerance for values."""
    assert_close(got, want, dtype=dtype, tolerance=TOLERANCES[dtype].value)


def assert_gradients_close(
    got: Any, want: Any, dtype: str = "float32", *, whole: Any = None
) -> None:
    """Compares trees within the table's tolerance for gradients; see `assert_close`."""
    tolerance = TOLERANCES[dtype].gradient
    assert_close(got, want, dtype=dtype, tolerance=tolerance, whole=whole)


def assert_close(
    got: Any, want: Any, *, dtype: str, tolerance: float, whole: Any = None
) -> None:
    """Compares trees; a looser tolerance than the table's carries its reason.

    An array whose largest value is below rounding noise of the full tree's largest
    counts as zero and is compared absolutely.

    Args:
      whole: a tree as `want`, where the arrays of `want` are cut from larger tensors:
        for each number the largest value of the tensor that it was cut from, on whose
        scale the tolerance is meant. One entry of a vector over layers can cancel to
        1e-4 of its neighbours and then holds rounding noise that differs between CPUs
        by 1e-3 of itself.
    """
    got, want = (jax.tree.map(_wide, tree) for tree in (got, want))
    largest = [np.max(np.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(want)]
    noise = 10 * float(jnp.finfo(dtype).eps) * max(largest, default=0.0)
    whole = want if whole is None else whole

    def share(leaf: np.ndarray, of: np.ndarray, cut_from: np.ndarray) -> np.ndarray:
        size = np.maximum(np.max(np.abs(of), initial=0.0), np.abs(cut_from))
        return np.where(size > noise, leaf / np.where(size > noise, size, 1.0), leaf)

    chex.assert_trees_all_equal_shapes(got, want, whole)
    chex.assert_trees_all_close(
        jax.tree.map(share, got, want, whole),
        jax.tree.map(share, want, want, whole),
        rtol=0.0,
        atol=tolerance,
    )


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float64)
