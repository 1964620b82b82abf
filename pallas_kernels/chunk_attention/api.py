"""The op: softmax over the ends of earlier chunks and the position's own term."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.chunk_attention import mesh_layout, mosaic_tpu, triton, xla
from pallas_kernels.chunk_attention.arrays import Array, ChunkEnds

Implementation = Literal["triton", "mosaic_tpu", "xla"]

_BACKENDS = {"triton": triton, "mosaic_tpu": mosaic_tpu, "xla": xla}
"""In order of preference; the last one can do everything."""


def chunk_attention(
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    ends: ChunkEnds,
    *,
    chunk: int,
    scale: float,
    first: Int[Array, " B"] | None = None,
    documents: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H E"]:
    """Computes o[t] = softmax(scale [q[t] K[s] for s < c(t); own[t]]) [V[s]; v[t]].

    Position t stands in chunk c(t) = first + t // C and sees the ends of all chunks
    before its own; its own chunk it sees through itself only. Head h reads query group
    h mod N. Softmax is at least float32. Source: RAT, eq. (4). One gradient covers the
    whole softmax: parts merged through a log-sum-exp whose gradient a library drops
    would train wrongly without an error.

    Args:
      q: queries in the frame of `ends.keys` (rotated).
      own_logits: q[t] k[t] with the position's own key, not yet scaled. Rotations by
        the same angle cancel in it, so that it needs none.
      own_values: v[t].
      ends: chunk ends; those that no position may see can hold anything finite.
      chunk: C, in positions.
      scale: multiplies all logits.
      first: number of the chunk that holds t = 0, for each row; None: 0, which also
        tells that half of the products are hidden.
      documents: document of each position: ends of other documents are hidden. None:
        one document.
      implementation: a backend, which then runs or raises; None: the first that can.

    Raises:
      ValueError: shapes disagree, or chunk < 1.
      NotImplementedError: the named backend cannot.
    """
    _check(q, own_logits, own_values, ends, chunk, first, documents)
    arrays = (q, own_logits, own_values, ends, first, documents)
    options = (("chunk", chunk), ("scale", scale))
    names = list(_BACKENDS) if implementation is None else [implementation]
    reason = None
    for name in names:
        if name not in _BACKENDS:
            raise ValueError(
                f"chunk_attention: wants an implementation of {list(_BACKENDS)}, got "
                f"{name!r}"
            )
        layout = mesh_layout.layout_of_call(*arrays)
        if name == "xla":
            # It can leave axes of the mesh to the compiler; left all of them, the
            # compiler gathers the rows of every device for a loop over heads.
            layout = layout if layout is not None and layout.cuts else None
            return _run(name, options, layout, *arrays)
        reason = mesh_layout.refusal(_BACKENDS[name], layout, *arrays, **dict(options))
        if reason is None:
            return _run(name, options, layout, *arrays)
    raise NotImplementedError(f"chunk_attention: {names[-1]}: {reason}")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(name, options, layout, *arrays):
    backend = _BACKENDS[name]
    return mesh_layout.forward(backend, layout, *arrays, **dict(options))[0]


def _forward(name, options, layout, *arrays):
    o, log_normalizer = mesh_layout.forward(
        _BACKENDS[name], layout, *arrays, **dict(options)
    )
    return o, (arrays, o, log_normalizer)


def _backward(name, options, layout, kept, for_o):
    arrays, o, log_normalizer = kept
    q, own_logits, own_values, ends, first, documents = arrays
    gradients = mesh_layout.backward(
        *(_BACKENDS[name], layout, *arrays, o, log_normalizer, for_o), **dict(options)
    )
    like = (q, own_logits, own_values, ends.keys, ends.values)
    for_q, for_logits, for_own, for_keys, for_values = (
        d.astype(x.dtype) for d, x in zip(gradients, like, strict=True)
    )
    no_documents = jax.tree.map(_no_gradient, ends.documents)
    return (
        for_q,
        for_logits,
        for_own,
        ChunkEnds(for_keys, for_values, no_documents),
        jax.tree.map(_no_gradient, first),
        jax.tree.map(_no_gradient, documents),
    )


_run.defvjp(_forward, _backward)


def _no_gradient(leaf: Array) -> np.ndarray:
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _check(q, own_logits, own_values, ends, chunk, first, documents) -> None:
    B, T, N, E = q.shape
    H, S = own_logits.shape[2], ends.keys.shape[2]
    if T < 1 or H % N:
        raise ValueError(
            f"chunk_attention: wants at least one position and query groups that "
            f"divide the heads, got {T}, and {N} groups for {H} heads"
        )
    wanted = {
        "own_logits": (own_logits, (B, T, H)),
        "own_values": (own_values, (B, T, H, E)),
        "ends.keys": (ends.keys, (B, H, S, E)),
        "ends.values": (ends.values, (B, H, S, E)),
        "ends.documents": (ends.documents, (B, S)),
        "first": (first, (B,)),
        "documents": (documents, (B, T)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"chunk_attention: wants {name} of shape {shape}, got {array.shape}"
            )
    if (documents is None) != (ends.documents is None):
        raise ValueError(
            "chunk_attention: wants documents of positions and of chunk ends, or "
            "neither, got one of them"
        )
    if chunk < 1:
        raise ValueError(f"chunk_attention: wants chunk of at least 1, got {chunk}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"chunk_attention: wants floating queries, got {q.dtype}")
