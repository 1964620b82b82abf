"""The definition, position by position; for tests, docs and bench."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

Array = jax.Array


def selective_scan_reference(
    u: Float[Array, "B T I"],
    dt: Float[Array, "B T I"],
    a: Float[Array, "I N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    *,
    skip: Float[Array, " I"] | None = None,
    z: Float[Array, "B T I"] | None = None,
    dt_bias: Float[Array, " I"] | None = None,
    initial: Float[Array, "B I N"] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
):
    """Returns (y [B, T, I], the last state [B, I, N]), in at least float32."""
    dtype = jnp.promote_types(u.dtype, jnp.float32)
    B, T, I = u.shape
    u, dt, a, b, c = (x.astype(dtype) for x in (u, dt, a, b, c))
    delta = dt if dt_bias is None else jax.nn.softplus(dt + dt_bias.astype(dtype))
    h = jnp.zeros((B, *a.shape), dtype) if initial is None else initial.astype(dtype)
    t = jnp.arange(T)
    restart = jnp.zeros((B, T), bool) if starts is None else starts
    real = jnp.ones((B, T), bool) if lengths is None else t < lengths[:, None]

    def position(h, at):
        u, delta, b, c, restart, real = at
        before = jnp.where(restart[:, None, None], 0, h)
        decay = jnp.exp(delta[..., None] * a)  # [B, I, N]
        after = decay * before + (delta * u)[..., None] * b[:, None]
        y = jnp.sum(after * c[:, None], axis=-1)
        return jnp.where(real[:, None, None], after, h), y

    by_time = [x.swapaxes(0, 1) for x in (u, delta, b, c, restart, real)]
    last, y = jax.lax.scan(position, h, tuple(by_time))
    y = y.swapaxes(0, 1)
    if skip is not None:
        y = y + skip.astype(dtype) * u
    if z is not None:
        y = y * jax.nn.silu(z.astype(dtype))
    return y, last
