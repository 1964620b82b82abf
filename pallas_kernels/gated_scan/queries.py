"""Queries that read a stream's states, for calls whose kernel does not read them.

    logits[t, h] = q[t, h mod N] . k~[t, channels of head h]

and the states at the ends of chunks, each with a gradient of its own.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.gated_scan.call import GatedScanCall, ScanOutputs, States

Array = jax.Array


def key_logits(
    queries: Float[Array, "B T N E"], keys: Float[Array, "B T D"]
) -> Float[Array, "B T H"]:
    """Computes q[t] k[t] of each head, in at least float32; head h reads group h mod N.

    It has no gradient rule: `pull_back` is its gradient.
    """
    dtype = jnp.promote_types(queries.dtype, jnp.float32)
    k = _by_head(keys, queries)
    return jnp.sum(k.astype(dtype) * _for_heads(queries, k), axis=-1)


def pull_back(
    queries: Float[Array, "B T N E"],
    keys: Float[Array, "B T D"],
    d_logits: Float[Array, "B T H"],
) -> tuple[Float[Array, "B T N E"], Float[Array, "B T D"]]:
    """Returns gradients of (queries, keys), each in its array's dtype."""
    # Behind a barrier XLA does not know the queries of the forward pass again, whose
    # copy tiled over the heads it would keep in memory.
    queries, keys = jax.lax.optimization_barrier((queries, keys))
    N, k, d = queries.shape[2], _by_head(keys, queries), d_logits[..., None]
    dk = (d * _for_heads(queries, k)).astype(k.dtype)
    # Add slices one by one: for a sum over an axis XLA strides through memory.
    rounds = [slice(at, at + N) for at in range(0, k.shape[2], N)]
    dq = sum(d[:, :, heads] * k[:, :, heads] for heads in rounds)
    return jnp.asarray(dq, queries.dtype), dk.reshape(keys.shape)


def ends_of(states: Float[Array, "B T D"], chunk: int) -> Float[Array, "B G D"]:
    """Returns the states at the ends of chunks."""
    return states[:, chunk - 1 :: chunk]


def add_at_ends(
    d_states: Float[Array, "B T D"], d_ends: Float[Array, "B G D"], chunk: int
) -> Float[Array, "B T D"]:
    """Adds the ends' gradient where the ends stand.

    Padded to all positions it would be one more array of all states.
    """
    B, T, D = d_states.shape
    folded = d_states.reshape(B, T // chunk, chunk, D)
    last = folded[:, :, chunk - 1 :] + d_ends[:, :, None].astype(folded.dtype)
    # Apart from the write: in one fusion with it XLA copies all of d_states first.
    last = jax.lax.optimization_barrier(last)
    folded = jax.lax.dynamic_update_slice(folded, last, (0, 0, chunk - 1, 0))
    return folded.reshape(d_states.shape)


def read_apart(
    call: GatedScanCall, states: States, finals: tuple[Float[Array, "B D"], ...]
) -> ScanOutputs:
    """Returns a call's outputs from all states, read by its queries if it has any."""
    queries, chunk = call.queries, call.options.chunk
    if queries is None:
        return ScanOutputs(states, finals, None)
    assert chunk is not None
    ends = ends_of(states[-1], chunk)
    logits = key_logits(queries, states[-1])
    return ScanOutputs((*states[:-1], ends), finals, logits)


def pull_apart(
    call: GatedScanCall, states: States, cotangents: ScanOutputs
) -> tuple[States, Array | None]:
    """Returns gradients of all states, and of the queries, from those of the outputs.

    Args:
      states: all of every stream.
    """
    d_states, _, d_logits = cotangents
    queries, chunk = call.queries, call.options.chunk
    if queries is None:
        return d_states, None
    assert chunk is not None and d_logits is not None
    dq, d_keys = pull_back(queries, states[-1], d_logits)
    return (*d_states[:-1], add_at_ends(d_keys, d_states[-1], chunk)), dq


def _by_head(keys: Array, queries: Array) -> Array:
    return keys.reshape(*keys.shape[:2], -1, queries.shape[3])


def _for_heads(queries: Array, k: Array) -> Array:
    """Tiles the queries of N groups over the heads of k."""
    return jnp.concatenate([queries] * (k.shape[2] // queries.shape[2]), axis=2)
