"""The definition, position by position; for tests, docs and bench."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from pallas_kernels.gated_scan.call import GateLogits
from pallas_kernels.gated_scan.queries import ends_of

Array = jax.Array


def gated_scan_reference(
    gate: Float[Array, "B T D"] | GateLogits,
    values: tuple[Float[Array, "B T _"], ...],
    *,
    initial: tuple[Float[Array, "B D"], ...] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    chunk: int | None = None,
):
    """Returns (h of each of `values`, the last of each), in at least float32."""
    dtype = jnp.promote_types(gate.dtype, jnp.float32)
    B, T, D = gate.shape
    if isinstance(gate, GateLogits):
        bias = 0 if gate.bias is None else gate.bias
        gate = jax.nn.sigmoid(gate.logits.astype(dtype) + bias)
    g = gate.astype(dtype).swapaxes(0, 1)
    v = jnp.stack([jnp.tile(v, (1, 1, D // v.shape[2])) for v in values])
    v = v.astype(dtype).swapaxes(0, 2).swapaxes(1, 2)  # [T, streams, B, D]
    h = jnp.zeros(v.shape[1:], dtype) if initial is None else jnp.stack(initial)
    t = jnp.arange(T)
    restart = jnp.zeros((T, B), bool) if starts is None else starts.T
    if chunk is not None:
        restart = restart | ((t > 0) & (t % chunk == 0))[:, None]
    real = jnp.ones((T, B), bool) if lengths is None else t[:, None] < lengths

    def position(carry, at):
        h, final = carry
        g, v, restart, real = at
        h = g * jnp.where(restart[:, None], 0, h) + (1 - g) * v
        return (h, jnp.where(real[:, None], h, final)), h

    (_, finals), states = jax.lax.scan(position, (h, h), (g, v, restart, real))
    return tuple(states.swapaxes(0, 1).swapaxes(1, 2)), tuple(finals)


def queried_scan_reference(
    gate: Float[Array, "B T D"] | GateLogits,
    values: Float[Array, "B T _"],
    keys: Float[Array, "B T W"],
    queries: Float[Array, "B T N E"],
    *,
    chunk: int,
    **options,
):
    """Returns (h of the values, ends of the keys' h, logits, the last h of both)."""
    (v, k), finals = gated_scan_reference(gate, (values, keys), chunk=chunk, **options)
    B, T, D = k.shape
    N, E = queries.shape[2:]
    # Head h = n + N m reads the queries of group n.
    by_head = k.reshape(B, T, D // (N * E), N, E)
    logits = jnp.einsum("btmne,btne->btmn", by_head, queries.astype(k.dtype))
    return v, ends_of(k, chunk), logits.reshape(B, T, D // E), finals
