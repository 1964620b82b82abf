"""The op: softmax over the ends of earlier chunks and the position's own term."""

from typing import Any

from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from pallas_kernels import dispatch, mesh_cut
from pallas_kernels.chunk_attention.call import (
    Array,
    BlockSizes,
    ChunkAttentionCall,
    ChunkAttentionOptions,
    ChunkEnds,
)
from pallas_kernels.dispatch import Implementation, Specs
from pallas_kernels.mesh_cut import Cut


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
    blocks: BlockSizes | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H E"]:
    """Computes o[t] = softmax(scale [q[t] K[s] for s < c(t); own[t]]) [V[s]; v[t]].

    Position t is in chunk c(t) = first + t // C and sees the ends of all earlier
    chunks; of its own chunk it sees only itself. Head h reads query group h mod N.
    Softmax is at least float32. Source: RAT, eq. (4). One gradient covers the full
    softmax: parts merged through a lse-sum-exp whose gradient a library drops would
    train wrongly without an error.

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
      blocks: how kernels cut the call; what is None they choose.
      implementation: a backend, which then runs or raises; None: the first that can.

    Raises:
      ValueError: shapes disagree, or chunk < 1.
      NotImplementedError: the named backend cannot.
    """
    options = ChunkAttentionOptions(
        chunk=chunk, scale=scale, blocks=blocks or BlockSizes()
    )
    call = ChunkAttentionCall(
        q, own_logits, own_values, ends, first, documents, options
    )
    _check(call)
    return dispatch.run(OP, call, implementation=implementation)


def _check(call: ChunkAttentionCall) -> None:
    q, own_logits, own_values, ends, first, documents, options = call
    if q.ndim != 4 or 0 in q.shape or own_logits.ndim != 3 or ends.keys.ndim != 4:
        raise ValueError(
            "chunk_attention: needs queries [B, T, N, E] of 1 or more, own_logits "
            f"[B, T, H] and ends.keys [B, H, S, E], got {q.shape}, "
            f"{own_logits.shape} and {ends.keys.shape}"
        )
    B, T, N, E = q.shape
    H, S = own_logits.shape[2], ends.keys.shape[2]
    if H % N:
        raise ValueError(
            f"chunk_attention: needs query groups that divide the heads, got {N} "
            f"groups for {H} heads"
        )
    shapes = {
        "own_logits": (own_logits, (B, T, H)),
        "own_values": (own_values, (B, T, H, E)),
        "ends.keys": (ends.keys, (B, H, S, E)),
        "ends.values": (ends.values, (B, H, S, E)),
        "ends.documents": (ends.documents, (B, S)),
        "first": (first, (B,)),
        "documents": (documents, (B, T)),
    }
    dispatch.check_shapes("chunk_attention", shapes)
    if (documents is None) != (ends.documents is None):
        raise ValueError(
            "chunk_attention: needs documents of positions and of chunk ends "
            "together, got one of them"
        )
    if options.chunk < 1:
        raise ValueError(
            f"chunk_attention: needs chunk of at least 1, got {options.chunk}"
        )
    dispatch.check_kinds(
        "chunk_attention",
        floating={
            "queries": q,
            "own_logits": own_logits,
            "own_values": own_values,
            "ends.keys": ends.keys,
            "ends.values": ends.values,
        },
        integers={
            "ends.documents": ends.documents,
            "first": first,
            "documents": documents,
        },
    )


def find_cut(call: ChunkAttentionCall) -> Cut | None:
    """Returns how the mesh that is set cuts the call by rows and heads, or None.

    Where fewer groups of queries than heads are given, head h reads group h mod N:
    heads are cut into parts whose size is a multiple of N, and each device holds all
    groups.
    """
    groups, heads = call.q.shape[2], call.own_logits.shape[2]

    def divide(devices: int) -> bool:
        part, rest = divmod(heads, devices)
        return rest == 0 and (groups == heads or part % groups == 0)

    return mesh_cut.find_cut(call.q.shape[0], divide)


def specs(cut: Cut, call: ChunkAttentionCall, backend: str) -> Specs:
    """Returns how the call and any backend's results are sharded."""
    del backend
    by_row, heads = P(cut.by_row), P(cut.by_row, None, cut.columns)
    # Keys, values and the log-sum-exp have heads before positions.
    heads_first: Any = P(cut.by_row, cut.columns)
    known: Any = None if call.ends.documents is None else by_row
    of_call = call._replace(
        q=heads if call.q.shape[2] == call.own_logits.shape[2] else by_row,
        own_logits=heads,
        own_values=heads,
        ends=ChunkEnds(heads_first, heads_first, known),
        first=None if call.first is None else by_row,
        documents=None if call.documents is None else by_row,
    )
    return Specs(of_call, heads, heads_first)


OP = dispatch.Op(
    name="chunk_attention",
    backends=dispatch.backends_in("pallas_kernels.chunk_attention"),
    find_cut=find_cut,
    specs=specs,
    reads_outputs=True,
    # The compiler alone would gather the rows of every device for a loop over heads.
    cuts_xla=True,
)
