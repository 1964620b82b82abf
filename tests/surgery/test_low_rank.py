"""The factors are the best of their rank, whichever side of the matrix is smaller."""

import numpy as np
import pytest

from recurjax.surgery.relaxed_recursive import low_rank_factors


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_what_is_left_has_the_dropped_singular_values_norm(shape):
    residual = np.random.default_rng(0).normal(size=shape)
    singular = np.linalg.svd(residual, compute_uv=False)
    for rank in range(1, min(shape) + 1):
        reduce, expand = low_rank_factors(residual, rank)
        assert reduce.shape == (shape[0], rank) and expand.shape == (rank, shape[1])
        left = np.linalg.norm(residual - reduce @ expand)
        np.testing.assert_allclose(left**2, (singular[rank:] ** 2).sum(), atol=1e-12)
        np.testing.assert_allclose(reduce.T @ reduce, np.eye(rank), atol=1e-12)
        scales = np.linalg.norm(expand, axis=1)
        np.testing.assert_allclose(np.sort(scales)[::-1], singular[:rank], rtol=1e-7)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
def test_directions_that_add_nothing_can_still_be_learned(shape):
    draw = np.random.default_rng(1)
    residual = np.outer(draw.normal(size=shape[0]), draw.normal(size=shape[1]))
    reduce, expand = low_rank_factors(residual, 3)
    np.testing.assert_allclose(reduce @ expand, residual, atol=1e-12)
    np.testing.assert_allclose(reduce.T @ reduce, np.eye(3), atol=1e-12)


def test_a_rank_beyond_the_matrix_is_refused():
    with pytest.raises(ValueError, match=r"1..2"):
        low_rank_factors(np.ones((2, 3)), 3)
