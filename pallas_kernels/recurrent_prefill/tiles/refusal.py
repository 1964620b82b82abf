"""What no Pallas backend does of a call, whatever its device and sizes."""

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerSpec,
    RecurrentCache,
)


def refusal_of_call(
    x: Float[Array, "B T D"], cache: RecurrentCache, spec: LayerSpec
) -> str | None:
    """Returns the first switch that is set and has no kernel, None where none is."""
    if x.shape[1] == 1 and cache.slots:
        # A tile's prefix is laid out for whole programs of rows, the cache with it: a
        # decode step of one row would move many times what it reads.
        return "leaves a decode step to xla, which reads the cache where it lies"
    if spec.block != 1:
        return f"runs blocks of one position, got block={spec.block}"
    if spec.dtype == "float64" or x.dtype == jnp.float64:
        return "computes in float32 at most"
    return None
