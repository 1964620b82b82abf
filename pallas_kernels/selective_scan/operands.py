"""What the kernels of both Pallas backends want of a call's arrays."""

import jax.numpy as jnp

from pallas_kernels.dispatch import refusal_of_dtypes


def refusal(u, dt, b, c, skip, z, dt_bias) -> str | None:
    """Returns why no kernel takes these arrays, whatever the device; None: one can."""
    if skip is None or z is None or dt_bias is None:
        return "wants skip, z and dt_bias, as a Mamba mixer gives them"
    arrays = {"u": u, "dt": dt, "b": b, "c": c, "z": z}
    return refusal_of_dtypes(arrays, jnp.float32, jnp.bfloat16)
