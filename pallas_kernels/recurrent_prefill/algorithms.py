"""The paper's Algorithms 1 and 2: the layer in tiles of powers of two, exactly.

All queries are known from the start. After position t, counted from 1, P = 2^v2(t) is
the largest power of two that divides t, and the next P queries meet the last P pairs:

              pairs 1 2 3 4 5 6 7
    query 2         1                     the number: after which position
          3         2 2                   the pair is computed
          4         2 2 3
          5         4 4 4 4
          6         4 4 4 4 5
          7         4 4 4 4 6 6
          8         4 4 4 4 6 6 7

Each query meets each earlier pair once. For readers and tests, next to `reference.py`:
the backends run other orders of the same sums, for reasons that the traffic table of
docs/design/recurrent_transformer.md shows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec, LayerWeights
from pallas_kernels.recurrent_prefill.reference import heads, mlp, norm, pair


class Running(NamedTuple):
    """The softmax state of every query: largest logit, normalizer, numerator."""

    m: Float[Array, "B T H"]
    l: Float[Array, "B T H"]
    o: Float[Array, "B T H E"]


def recurrent_layer_tiled(
    x: Float[Array, "B N D"], w: LayerWeights, *, spec: LayerSpec, tile: int
) -> Float[Array, "B N D"]:
    """Returns z of one layer by Algorithm 1.

    Args:
      w: weights of one layer, without the axis of layers.
      spec: with block 1.
      tile: B, the most queries that `update_tile` takes at once.
    """
    B, N = x.shape[:2]
    scale, bias = w.attention_norm_scale, w.attention_norm_bias
    normed = norm(x, scale, bias, spec, "norm")
    q = heads(normed, w.w_q, w.b_q, w.q_norm_scale, w.q_norm_bias, jnp.arange(N), spec)
    zeros = jnp.zeros((B, N, spec.heads), x.dtype)
    state = Running(zeros - jnp.inf, zeros, jnp.zeros_like(q))
    shape = B, N, spec.key_heads, spec.head_width
    k, v, z = jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype), jnp.zeros_like(x)
    for t in range(1, N + 1):
        here = slice(t - 1, t)
        temporary = pair(normed[:, here], w, jnp.arange(t - 1, t), spec)
        state = update_tile(state, q, here, *temporary, here, spec)
        a = state.o[:, t - 1] / state.l[:, t - 1, :, None]
        a = jnp.einsum("bhe,hed->bd", a, w.w_out)
        y = x[:, t - 1] + spec.residual_scale * (a if w.b_out is None else a + w.b_out)
        branch = mlp(
            norm(y, w.mlp_norm_scale, w.mlp_norm_bias, spec, "norm"), w, spec.activation
        )
        z = z.at[:, t - 1].set(y + spec.residual_scale * branch)
        source = (
            norm(z[:, here], scale, bias, spec, "norm")
            if spec.normed_persistent
            else z[:, here]
        )
        new_k, new_v = pair(source, w, jnp.arange(t - 1, t), spec)
        k, v = k.at[:, here].set(new_k), v.at[:, here].set(new_v)
        P = t & -t  # the largest power of two that divides t
        for u in range(t, min(t + P, N), tile):
            queries, keys = slice(u, min(u + tile, t + P, N)), slice(t - P, t)
            state = update_tile(state, q, queries, k[:, keys], v[:, keys], keys, spec)
    return z


def update_tile(
    state: Running,
    q: Float[Array, "B N H E"],
    queries: slice,
    k: Float[Array, "B P K E"],
    v: Float[Array, "B P K E"],
    keys: slice,
    spec: LayerSpec,
) -> Running:
    """Adds a tile of pairs to a tile of queries by Algorithm 2, the online softmax."""
    k, v = (jnp.repeat(part, spec.heads // spec.key_heads, axis=2) for part in (k, v))
    logits = spec.logit_scale * jnp.einsum("bqhe,bshe->bqhs", q[:, queries], k)
    if spec.alibi_max_bias is not None:
        exponents = jnp.arange(1, spec.heads + 1) / spec.heads
        far = jnp.arange(queries.start, queries.stop)[:, None]
        far = far - jnp.arange(keys.start, keys.stop)
        bias = 2.0 ** (-spec.alibi_max_bias * exponents[:, None]) * far[:, None]
        logits -= bias.astype(logits.dtype)
    old = jax.tree.map(lambda part: part[:, queries], state)
    m = jnp.maximum(old.m, logits.max(-1))
    fade, p = jnp.exp(old.m - m), jnp.exp(logits - m[..., None])
    new = Running(
        m,
        old.l * fade + p.sum(-1),
        old.o * fade[..., None] + jnp.einsum("bqhs,bshe->bqhe", p, v),
    )
    return jax.tree.map(lambda part, rows: part.at[:, queries].set(rows), state, new)


def vectors_moved(N: int, *, tile: int) -> tuple[int, int]:
    """Counts what Algorithm 1 moves for a head: pairs read, and query states passed.

    A pair is k and v; a state is read and written with its query: q, o, m and l. A tile
    of queries stays on chip while it meets its P pairs, which are read for it once.
    """
    pairs = states = N  # temporary pairs
    for t in range(1, N):
        P = t & -t
        queries = min(P, N - t)
        pairs += P * -(-queries // tile)
        states += queries
    return pairs, states
