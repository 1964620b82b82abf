"""The linear map of the last axis."""

from flax import nnx
from jaxtyping import Float

from recurjax.layers.sequence_axis import as_matrix
from recurjax.types import Array


def linear(
    x: Float[Array, "... N"],
    weight: Array | nnx.Param,
    bias: Array | nnx.Param | None = None,
) -> Float[Array, "... M"]:
    """Computes x @ weight + bias in x's dtype, with weight [N, M] cast to it.

    The bias [M] is added before its own dtype is left, so that its gradient, a sum over
    all positions, is not accumulated in bfloat16.
    """
    weight = weight[...].astype(x.dtype)
    # As one product of two matrices: with two axes in front, XLA on CPU writes a
    # transposed copy of y's gradient for the weight's (10 % of a training step).
    y = as_matrix(x) @ weight
    y = y.reshape(*x.shape[:-1], weight.shape[-1])
    return y if bias is None else (y + bias[...]).astype(x.dtype)
