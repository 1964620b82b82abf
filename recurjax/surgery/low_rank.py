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
    return factors_along(residual, leading_vectors(residual, rank))


def leading_vectors(
    residual: Float[np.ndarray, "N M"], rank: int
) -> Float[np.ndarray, "S R"]:
    """Returns the leading singular vectors of the smaller side, S = min(N, M).

    They are the left ones where N <= M. Of a matrix and its negative they are the same.

    Args:
      rank: R, at most min(N, M).
    """
    residual = np.asarray(residual, np.float64)
    N, M = residual.shape
    if not 1 <= rank <= min(N, M):
        raise ValueError(
            f"leading_vectors: rank must lie in 1..{min(N, M)}, got {rank}"
        )
    gram = residual @ residual.T if N <= M else residual.T @ residual
    # Eigenvalues come in ascending order.
    return np.linalg.eigh(gram)[1][:, ::-1][:, :rank]


def factors_along(
    residual: Float[np.ndarray, "N M"], vectors: Float[np.ndarray, "S R"]
) -> Factors:
    """Returns the A and B whose product is the residual's part along these vectors."""
    residual = np.asarray(residual, np.float64)
    N, M = residual.shape
    if N <= M:
        return Factors(vectors, vectors.T @ residual)
    # residual @ vectors = V S: its orthonormal basis is V, whatever S holds of zeros.
    reduce, scales = np.linalg.qr(residual @ vectors)
    return Factors(reduce, scales @ vectors.T)
