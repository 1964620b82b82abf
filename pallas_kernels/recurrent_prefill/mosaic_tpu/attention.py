"""Attention of rows' queries to a chunk of their prefix on TPU, heads in groups."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import HIDDEN
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    LANES,
    PAIR,
    HeadGroup,
    dot,
)


class Running(NamedTuple):
    """Softmax state of queries that have read some of their keys."""

    largest: Any
    normalizer: Any
    weighted: Any

    @classmethod
    def scratch(cls, *shape: int, numbers: int, width: int) -> "Running":
        """Returns VMEM for the state of queries [*shape].

        Args:
          numbers, width: lanes of a query's largest logit and sum; of its values.
        """
        of_heads = pltpu.VMEM((*shape, numbers), jnp.float32)
        return cls(of_heads, of_heads, pltpu.VMEM((*shape, width), jnp.float32))


class Stacked(NamedTuple):
    """Rows' queries by group of heads: those of M = b x heads one below the other.

    Numbers fill their lanes, so that they need not be spread for every chunk.
    """

    q: Any  # [PAIR, groups, M, width]
    state: Any  # numbers [PAIR, groups, M, LANES], weighted [PAIR, groups, M, width]

    @classmethod
    def scratch(cls, groups: list[HeadGroup], b: int, dtype) -> "Stacked":
        """Returns VMEM for it."""
        shape, width = (PAIR, len(groups), b * groups[0].heads), groups[0].width
        state = Running.scratch(*shape, numbers=LANES, width=width)
        return cls(pltpu.VMEM((*shape, width), dtype), state)


class Span(NamedTuple):
    """Which slots a row's queries see, and where query 0 stands among them."""

    stop: Any
    query: Any


def stack(q_ref, stacked: Stacked, groups, spec: LayerSpec):
    """Starts PAIR rows: the heads' queries one below the other, nothing read yet.

    Heads narrower than a register's 128 lanes go together: each query has the other
    heads' lanes cleared, so that the keys' lanes go to the matrix unit once.

    Args:
      q_ref: [PAIR, b, H E].
    """
    for g, group in enumerate(groups):
        q = q_ref[:, :, _columns(group, spec)]
        owner = jax.lax.broadcasted_iota(jnp.int32, q.shape, 2) // spec.head_width
        for h, mine in enumerate(_queries(group, q.shape[1])):
            alone = jnp.where(owner == h, q, jnp.zeros_like(q))
            stacked.q[:, g, mine, : group.width] = alone
    largest, normalizer, weighted = stacked.state
    largest[:] = jnp.full_like(largest, HIDDEN)
    normalizer[:] = jnp.zeros_like(normalizer)
    weighted[:] = jnp.zeros_like(weighted)


def attend_chunk(
    pairs,
    stacked: Stacked,
    groups,
    b: int,
    first,
    spans: list[Span],
    same: list[Array] | None,
    spec: LayerSpec,
):
    """Merges one chunk of PAIR rows' prefix into the state of their b queries each.

    Args:
      pairs: keys and values, [PAIR, chunk, H E]; values beyond the prefix are 0.
      first: the slot of the chunk's first pair.
      spans: of each row, or one for all.
      same: of each row, which pairs are of which query's document; None: all of all.
    """
    keys_ref, values_ref = pairs
    shape = (b * groups[0].heads, keys_ref.shape[1])
    at = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    query = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    rank = jax.lax.rem(query, b)
    distances = [(s.query + rank - at).astype(jnp.float32) for s in spans] * PAIR
    seen = [at < span.stop for span in spans] * PAIR
    if same is not None:
        seen = [both & alike for both, alike in zip(seen, same, strict=True)]

    def logits_of(i, g, group):
        M = group.heads * b
        q, k = stacked.q[i, g, :M, : group.width], keys_ref[i, :, _columns(group, spec)]
        logits = spec.logit_scale * dot(q, k, transposed=True)
        if spec.alibi_max_bias is not None:
            rate = -spec.alibi_max_bias / spec.heads
            slope = jnp.zeros((M, shape[1]), jnp.float32)
            for h, mine in enumerate(_queries(group, b)):
                below = query[:M] >= mine.start
                slope = jnp.where(below, 2.0 ** (rate * (group.first + h + 1)), slope)
            logits = logits - slope * distances[i][:M]
        return jnp.where(seen[i][:M], logits, HIDDEN)

    # Every group of every row does one step before any does the next: while one waits
    # for the matrix unit or for a sum over lanes, the others go on.
    parts = [(i, g, group) for i in range(PAIR) for g, group in enumerate(groups)]
    states = [
        Running(*(ref.at[i, g, pl.ds(0, b * group.heads)] for ref in stacked.state))
        for i, g, group in parts
    ]
    logits = [logits_of(*part) for part in parts]
    old = [state.largest[...] for state in states]
    largest = [
        jnp.maximum(most, jnp.max(new, axis=1, keepdims=True))
        for most, new in zip(old, logits, strict=True)
    ]
    # Beside a pair that is seen others weigh exactly 0. A chunk of a cache, or of other
    # documents, may have none: what it adds, the tile's own pairs multiply with 0.
    p = [jnp.exp(new - most) for new, most in zip(logits, largest, strict=True)]
    read = [
        dot(weights.astype(values_ref.dtype), values_ref[i, :, _columns(group, spec)])
        for weights, (i, _, group) in zip(p, parts, strict=True)
    ]
    for n, (state, (_, _, group)) in enumerate(zip(states, parts, strict=True)):
        shrink, mine = jnp.exp(old[n] - largest[n]), pl.ds(0, group.width)
        total = jnp.sum(p[n], axis=1, keepdims=True)
        state.largest[:] = largest[n]
        state.normalizer[:] = state.normalizer[...] * shrink + total
        weighted = state.weighted[:, mine] * _repeated(shrink, group.width)
        state.weighted[:, mine] = weighted + read[n]


def unstack(stacked: Stacked, state: Running, groups, spec: LayerSpec):
    """Puts PAIR rows' heads side by side, [b, H E], and their numbers in lanes."""
    _, b, lanes = state.largest.shape
    head = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (b, lanes), 1), spec.heads)
    for i in range(PAIR):
        largest = normalizer = jnp.zeros((b, lanes), jnp.float32)
        for g, group in enumerate(groups):
            shape = (b, group.width)
            owner = jax.lax.broadcasted_iota(jnp.int32, shape, 1) // spec.head_width
            own = jnp.zeros(shape, jnp.float32)
            for h, queries in enumerate(_queries(group, b)):
                most, total = (
                    _repeated(ref[i, g, queries], lanes) for ref in stacked.state[:2]
                )
                mine = head == group.first + h
                largest = jnp.where(mine, most, largest)
                normalizer = jnp.where(mine, total, normalizer)
                weighted = stacked.state.weighted[i, g, queries, : group.width]
                own = jnp.where(owner == h, weighted, own)
            state.weighted[i, :, _columns(group, spec)] = own
        state.largest[i], state.normalizer[i] = largest, normalizer


def _columns(group: HeadGroup, spec: LayerSpec):
    """Returns a group's columns among those of all heads."""
    first = group.first * spec.head_width
    return slice(first, first + group.width)


def _queries(group: HeadGroup, b: int) -> list[slice]:
    """Returns where each head of a group has its queries in a stack."""
    return [slice(h * b, (h + 1) * b) for h in range(group.heads)]


def _repeated(numbers: Float[Array, "M lanes"], width: int) -> Float[Array, "M width"]:
    """Returns numbers that are the same in all lanes in `width` lanes."""
    copies = -(-width // numbers.shape[1])
    return jnp.concatenate([numbers] * copies, axis=1)[:, :width]
