"""The paper's theory as code: section 4, appendix A and the stability theorem.

A norm-free layer here is attention with logits q k / sqrt(E), branches scaled by 1 and
a two-matrix GELU MLP without biases.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill import LayerWeights
from recurjax.types import Array


def simulate_transformer(weights: LayerWeights) -> LayerWeights:
    """Returns norm-free Recurrent layers of width 3 d' that compute a Transformer's.

    The state has three blocks of d' features: carry, which alone K and V read; live,
    where the next activation is written; scratch, where attention lands and from which
    the MLP takes it back:

        (x; *; 0) -> (x; x + a + MLP(x + a); 0)

    Even layers carry in the first block and write to the second; odd layers have the
    two swapped. Appendix A.2 swaps the state between layers instead, which is the same.
    Linear maps pass through the MLP as u = gelu(u) - gelu(-u), exactly.

    Args:
      weights: norm-free Transformer layers without biases or gate; their heads and
        logit scale stay as they are.

    Raises:
      ValueError: there are norms, biases or a gate.
    """
    # The first six fields are the matrices that every layer has.
    extra = [n for n, leaf in weights._asdict().items() if leaf is not None][6:]
    if extra:
        raise ValueError(
            f"simulate_transformer: needs no norm, bias or gate, got {extra}"
        )
    # Even and odd layers have carry and live swapped.
    L = weights.w_q.shape[0]
    layers = [
        _simulate_layer(jax.tree.map(lambda leaf, i=i: leaf[i], weights), i % 2)
        for i in range(L)
    ]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


def embed(x: Float[Array, "B T d"]) -> Float[Array, "B T D"]:
    """Puts a Transformer's input into the carry block of width 3 d'."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 2 * x.shape[-1])))


def live(z: Float[Array, "B T D"], layer: int) -> Float[Array, "B T d"]:
    """Reads the simulated output of layer l, from 0, out of the layer's output."""
    return jnp.split(z, 3, axis=-1)[(layer + 1) % 2]


def concentrate_on_previous(
    v: Float[Array, "D D"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    *,
    strength: float,
) -> LayerWeights:
    """Returns a norm-free layer of width D + 1 that is a token-to-token recurrence.

        z_i = x_i + V z_{i-1} + MLP(x_i + V z_{i-1})

    A last feature, 0 in x, is set to 1 in z: keys show it, so the persistent pairs
    outweigh the temporary one by `strength`, and ALiBi, steep enough, leaves the latest
    of them. Section 4.2; one head, E = D + 1, logits unscaled.
    """
    D = v.shape[0]
    grow = lambda part, rows, columns: jnp.pad(part, ((0, rows), (0, columns)))  # noqa: E731
    # The flag feature: 0 in x, 1 in z. Keys show it, so queries can prefer what is a
    # layer's output to what is its input.
    flag = jnp.zeros((D + 1, D + 1), v.dtype).at[D, D].set(1)
    query = jnp.zeros(D + 1, v.dtype).at[D].set(strength)
    w_down = grow(down, 0, 1)
    zero = jnp.zeros_like(query)
    return LayerWeights(
        # A constant query, from the bias alone: all positions ask for the flag.
        w_q=jnp.zeros((1, D + 1, 1, D + 1), v.dtype),
        w_k=flag[None, :, None],
        w_v=grow(v.T, 1, 1)[None, :, None],
        w_out=jnp.eye(D + 1, dtype=v.dtype)[None, None],
        w_up=grow(up, 1, 0)[None],
        w_down=w_down[None],
        b_q=query[None, None],
        b_k=zero[None, None],
        b_v=zero[None, None],
        b_down=jnp.zeros_like(query).at[D].set(1)[None],
    )


def simplified_layer(
    x: Float[Array, "T D"], v: Float[Array, "D D"], alpha: float
) -> Float[Array, "T D"]:
    """Runs z_k = x_k + alpha/k V (x_k + z_1 + ... + z_{k-1}), k from 1."""
    z: list[Array] = []
    for k, x_k in enumerate(x, start=1):
        # z_k by its definition: each later sum includes all earlier outputs.
        z.append(x_k + alpha / k * (v @ (x_k + sum(z, jnp.zeros_like(x_k)))))
    return jnp.stack(z)


def simplified_gradient(
    v: Float[Array, "D D"], alpha: float, k: int
) -> Float[Array, "D D"]:
    """Returns dz_k/dx_1 = 1/k! sum_r [k r] (alpha V)^r for k >= 2, else I + alpha V.

    [k r] counts the permutations of k elements with r cycles. Stability theorem of
    section 5; its proof has the case k = 1.
    """
    identity = jnp.eye(v.shape[0], dtype=v.dtype)
    if k == 1:
        return identity + alpha * v
    total, power = jnp.zeros_like(v), identity
    for r in range(1, k + 1):
        # (alpha V)^r, one power further each time.
        power = alpha * power @ v
        total = total + cycle_count(k, r) / math.factorial(k) * power
    return total


def cycle_count(k: int, r: int) -> int:
    """Counts permutations of k elements with exactly r cycles (Stirling, unsigned)."""
    if k == r:
        return 1
    if r < 1 or r > k:
        return 0
    # Put element k into a cycle of its own, or behind one of the k - 1 others.
    return cycle_count(k - 1, r - 1) + (k - 1) * cycle_count(k - 1, r)


def _simulate_layer(w: LayerWeights, carry: int) -> LayerWeights:
    d = w.w_q.shape[0]
    zero, eye = jnp.zeros((d, d), w.w_q.dtype), jnp.eye(d, dtype=w.w_q.dtype)
    scratch = 2

    def rows(block: int, part: Array) -> Array:
        """Places a map's input rows [d', ...] in one block of 3 d'."""
        wide = jnp.zeros((3, *part.shape), part.dtype)
        return wide.at[block].set(part).reshape(3 * d, *part.shape[1:])

    def stacked(carried: Array, lived: Array, scratched: Array) -> Array:
        parts = [carried, lived] if carry == 0 else [lived, carried]
        return jnp.concatenate([*parts, scratched])

    # The MLP writes MLP(x + a) and cancels old values: x + a - live into live, -a into
    # scratch.
    for_live, for_scratch = stacked(eye, -eye, eye), stacked(zero, zero, -eye)
    # The Transformer's own MLP reads x + a: carry plus scratch.
    none = jnp.zeros_like(w.w_up)
    reads = stacked(w.w_up, none, w.w_up)
    # gelu(u) - gelu(-u) = u, so a linear map takes two rows, u and -u.
    up = [reads, for_live, -for_live, for_scratch, -for_scratch]
    to_live = jnp.concatenate([w.w_down, eye, -eye, zero, zero])
    to_scratch = jnp.concatenate([jnp.zeros_like(w.w_down), zero, zero, eye, -eye])
    down = [jnp.zeros_like(to_live), to_live, to_scratch]
    # Odd layers write to the first block and carry the second.
    if carry == 1:
        down[:2] = down[1::-1]
    out = jnp.moveaxis(w.w_out, 2, 0)  # [d', H, E]
    return LayerWeights(
        w_q=rows(carry, w.w_q),
        w_k=rows(carry, w.w_k),
        w_v=rows(carry, w.w_v),
        w_out=jnp.moveaxis(rows(scratch, out), 0, 2),
        w_up=jnp.concatenate(up, axis=1),
        w_down=jnp.concatenate(down, axis=1),
    )
