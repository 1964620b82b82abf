"""Attention's two products for few queries, which read a cache in place.

XLA has products over batch dimensions that come first, so that [B, S, K, E] by key
head costs a transposed copy of keys and of values. It pays off when many queries read
the copy; for one, the copy is the step. Here all heads' keys of a token are one row of
width K E, and a query is such a row too, zero outside its own head. That needs K times
the multiplications, but memory bandwidth determines a step's time. The zeros meet the
other heads' keys: one that is infinite makes the logits of all heads NaN.

On a GPU one query's products are sums, which XLA fuses with the cache's slice; what one
row alone asks of it is in `choose_part`.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels import target

MOST_ROWS = 32
"""T H up to which this was measured to be no slower than the copy (on CPU, T = 1)."""

PART = 64
"""Slots of a part; the sums of parts, written and read, are 6 % of the values."""


def pay_off(queries: int, heads: int) -> bool:
    """Returns whether a copy of the keys costs more than these queries' products."""
    # A decode step on a CPU; on other devices the copy overlaps with what follows.
    few = queries == 1 and heads <= MOST_ROWS
    return few and target.current().platform == "cpu"


def few_logits(
    q: Float[Array, "B T H E"], k: Float[Array, "B S K E"], dtype
) -> Float[Array, "B H T S"]:
    """Computes q[t, h] k[s, h // (H / K)], accumulated in `dtype`."""
    B, T, H, E = q.shape
    S, K = k.shape[1:3]
    folded = q.reshape(B, T, K, H // K, 1, E)
    same_head = jnp.eye(K, dtype=bool)[:, None, :, None]  # [K, 1, K, 1]
    rows = jnp.where(same_head, folded, 0).reshape(B, T * H, K * E)
    keys = k.reshape(B, S, K * E)
    # Keys first: with the rows first, XLA's plain CPU kernels, those that host.prepare
    # chooses, take 10 to 30 times as long for the same product.
    logits = jnp.einsum("bsi,bri->bsr", keys, rows, preferred_element_type=dtype)
    return logits.reshape(B, S, T, H).transpose(0, 3, 2, 1)


def few_mixtures(
    weights: Float[Array, "B H T S"], v: Float[Array, "B S K E"], dtype=None
) -> Float[Array, "B T H E"]:
    """Computes sum_s weights[h, t, s] v[s, h // (H / K)], accumulated in `dtype`.

    None: in the operands' own.
    """
    B, H, T, S = weights.shape
    K, E = v.shape[2:]
    rows = weights.swapaxes(1, 2).reshape(B, T * H, S)
    values = v.reshape(B, S, K * E)
    mixtures = jnp.einsum("brs,bsi->bri", rows, values, preferred_element_type=dtype)
    mixtures = mixtures.reshape(B, T, K, H // K, K, E)
    return jnp.einsum("btkgke->btkge", mixtures).reshape(B, T, H, E)


def choose_part(batch: int, queries: int, slots: int) -> int:
    """Returns how many slots each sum over them takes; all of them, or a part.

    A GPU is not filled by the sums of one row's next position. XLA cuts those over more
    than 4,096 slots by itself; of fewer it writes every weighted value to memory first,
    which is three times the bytes.
    """
    alone = batch == queries == 1 and target.current().platform == "gpu"
    return min(PART, slots) if alone else slots


def summed_mixtures(
    p: Float[Array, "B S K Q"], v: Float[Array, "B S K E"]
) -> Float[Array, "B K Q E"]:
    """Computes sum_s p[s, k, q] v[s, k] of one position by sums, in p's dtype."""
    S = p.shape[1]
    part = choose_part(p.shape[0], 1, S)

    def summed(p: Array, v: Array, axis: int) -> Array:
        return jnp.sum(p[..., None] * v[..., None, :].astype(p.dtype), axis=axis)

    if part == S:
        return summed(p, v, 1)
    end = S - S % part
    in_parts = (x[:, :end].reshape(x.shape[0], -1, part, *x.shape[2:]) for x in (p, v))
    # Separate from the sum over the parts, with which XLA would fuse it again.
    sums = jax.lax.optimization_barrier(summed(*in_parts, axis=2))
    return jnp.sum(sums, axis=1) + summed(p[:, end:], v[:, end:], 1)
