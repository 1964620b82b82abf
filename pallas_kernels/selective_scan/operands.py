"""What the kernels of both Pallas backends want of a call's arrays."""

import jax.numpy as jnp


def refusal(u, dt, b, c, skip, z, dt_bias) -> str | None:
    """Returns why no kernel takes these arrays, whatever the device; None: one can."""
    if skip is None or z is None or dt_bias is None:
        return "wants skip, z and dt_bias, as a Mamba mixer gives them"
    for name, x in (("u", u), ("dt", dt), ("b", b), ("c", c), ("z", z)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"computes in float32 and bfloat16, got {name} of {x.dtype}"
    return None
