"""What no Pallas backend does of a call, whatever its device and sizes."""

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec, Rows


def refusal_of_call(
    x: Float[Array, "B T D"], rows: Rows, spec: LayerSpec
) -> str | None:
    """Returns the first switch that is set and has no kernel, None where none is."""
    if spec.block != 1:
        return f"runs blocks of one position, got block={spec.block}"
    if spec.rope_base is not None:
        return "has no rotary embedding"
    if rows.segments is not None:
        return "has no segments"
    if spec.dtype == "float64" or x.dtype == jnp.float64:
        return "computes in float32 at most"
    return None
