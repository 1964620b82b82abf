"""The best addition of a given rank to a matrix, by singular values."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Factors(NamedTuple):
    """R is about A B: A has orthonormal columns, B carries the singular values."""

    reduce: Float[np.ndarray, "N R"]
    expand: Float[np.ndarray, "R M"]


def low_rank_factors(residual: Float[np.ndarray, "N M"], rank: int) -> Factors:
    """Returns the A [N, R] and B [R, M] whose product is nearest to the residual.

    With residual = V S U^T (the paper's U S V^T, which is of x W^T) these are A = V_r
    and B = S_r U_r^T, eq. (4); what is left has the dropped singular values' norm. The
    singular vectors are eigenvectors of the smaller Gram matrix, in float64: the larger
    side is then never squared. A's columns are orthonormal where singular values vanish
    too, so that such a direction can still be learned.

    Args:
      rank: R, at most min(N, M).
    """
    residual = np.asarray(residual, np.float64)
    N, M = residual.shape
    if not 1 <= rank <= min(N, M):
        raise ValueError(
            f"low_rank_factors: rank must lie in 1..{min(N, M)}, got {rank}"
        )
    # The smaller Gram matrix: its eigenvectors are the singular vectors of that side.
    if N <= M:
        _, vectors = np.linalg.eigh(residual @ residual.T)
        reduce = vectors[:, ::-1][:, :rank]  # eigenvalues come in ascending order
        return Factors(reduce, reduce.T @ residual)
    _, vectors = np.linalg.eigh(residual.T @ residual)
    largest = vectors[:, ::-1][:, :rank]
    # residual @ largest = V S: its orthonormal basis is V, whatever S holds of zeros.
    reduce, scales = np.linalg.qr(residual @ largest)
    return Factors(reduce, scales @ largest.T)
