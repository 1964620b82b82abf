"""The forward kernel on GPU: flash attention over chunk ends, own term merged in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.chunk_attention.call import Array, ChunkAttentionCall
from pallas_kernels.chunk_attention.triton_launch import (
    HIDDEN,
    LOG2_E,
    Launch,
    computed_pairs,
    dot,
    first_chunk,
    launch_kernel,
    load_rows,
    mask_arrays,
    mask_specs,
    same_document,
    store_rows,
)
from pallas_kernels.chunk_attention.visibility import cdiv, seen_ends, sees
from pallas_kernels.named_refs import by_name


def attend(
    launch: Launch, call: ChunkAttentionCall
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Returns o and the log-sum-exp; the call has at least one end."""
    q, own_logits, own_values, (keys, values, _) = call[:4]
    B, T, H, E = own_values.shape
    N, S, rows = launch.groups, keys.shape[2], launch.tiles.block_q
    blocks = cdiv(T, rows)
    # The last blocks see most ends: they start first.
    at = lambda h, i, b: (b, blocks - 1 - i)  # noqa: E731
    by_row = pl.BlockSpec((None, rows, None, E), lambda h, i, b: (*at(h, i, b), h, 0))
    of_group = pl.BlockSpec(
        (None, rows, None, E), lambda h, i, b: (*at(h, i, b), h % N, 0)
    )
    scalars = pl.BlockSpec((None, rows, None), lambda h, i, b: (*at(h, i, b), h))
    all_keys = pl.BlockSpec((None, None, S, E), lambda h, i, b: (b, h, 0, 0))
    lse = pl.BlockSpec((None, None, rows), lambda h, i, b: (b, h, blocks - 1 - i))
    o, lse = launch_kernel(
        launch,
        _forward_kernel,
        *mask_arrays(call),
        q,
        own_logits,
        own_values,
        keys,
        values,
        grid=(H, blocks, B),
        in_specs=[
            *mask_specs(launch, rows, at),
            of_group,
            scalars,
            by_row,
            all_keys,
            all_keys,
        ],
        out_specs=[by_row, lse],
        out_shape=[
            jax.ShapeDtypeStruct(own_values.shape, own_values.dtype),
            jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        ],
        # Float32 operands take twice as many registers.
        accumulator=rows * E * (2 if q.dtype == jnp.float32 else 1),
        products=2,  # q k^T, p v
        pairs=computed_pairs(launch, block_q=rows, block_k=launch.tiles.block_k),
    )
    return o, lse


class _Refs(NamedTuple):
    """References of the kernel; a mask is a tuple of one, or empty."""

    first: tuple[Any, ...]  # [1]: the row's number of its first chunk
    documents: tuple[Any, ...]  # [rows]
    end_documents: tuple[Any, ...]  # [S]
    q: Any  # [rows, E]
    own_logit: Any  # [rows]
    own_value: Any  # [rows, E]
    keys: Any  # [S, E]
    values: Any  # [S, E]
    o: Any  # out, [rows, E]
    lse: Any  # out, [rows]


# A program owns `rows` positions of one head, of as many chunks as they span. Their
# softmax starts from the own term and stays in registers while the ends that any of
# them sees stream by once; blocks of ends that all of them see need no mask. Crossing
# memory: q, own term and o once, the seen ends once per program.
def _forward_kernel(*refs, launch: Launch):
    at = by_name(_Refs, refs, **launch.masks)
    rows, count = launch.tiles.block_q, launch.tiles.block_k
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * rows
    t = start + jnp.arange(rows)
    real = t < launch.length
    # 1. What belongs to the program's positions: read once, kept in registers.
    first = first_chunk(at)
    documents = load_rows(at.documents[0], real=real) if at.documents else t
    q = load_rows(at.q, real=real)
    own_logit = load_rows(at.own_logit, real=real).astype(jnp.float32)
    own_logit = own_logit * (launch.scale * LOG2_E)

    def add_block(j, running, masked: bool):
        largest, normalizer, weighted = running
        s = j * count + jnp.arange(count)
        part = pl.ds(j * count, count)
        k = load_rows(at.keys.at[part, :], real=s < launch.ends).astype(q.dtype)
        v = load_rows(at.values.at[part, :], real=s < launch.ends).astype(q.dtype)
        logits = dot(q, k, transposed=True) * (launch.scale * LOG2_E)
        if masked:
            seen = sees(first, t[:, None], s[None, :], chunk=launch.chunk)
            seen = seen & (s < launch.ends)[None, :]
            if launch.has_documents:
                same = same_document(launch, at, documents, j * count, count)
                seen = seen & same
            logits = jnp.where(seen, logits, HIDDEN)
        # A larger maximum rescales what was summed under the old one.
        above = jnp.maximum(largest, jnp.max(logits, axis=1))
        shrink = jnp.exp2(largest - above)
        p = jnp.exp2(logits - above[:, None])
        normalizer = normalizer * shrink + jnp.sum(p, axis=1)
        return above, normalizer, weighted * shrink[:, None] + dot(p.astype(v.dtype), v)

    v = load_rows(at.own_value, real=real).astype(jnp.float32)
    # 2. The softmax starts from the own term, of weight exp(0) = 1: no row is empty.
    running = (own_logit, jnp.ones(rows, jnp.float32), v)
    sizes = {"chunk": launch.chunk, "ends": launch.ends}
    # 3. Ends before `unmasked` blocks are seen by every position of the program.
    unmasked = 0 if launch.has_documents else seen_ends(first, start, **sizes) // count
    last = jnp.minimum(start + rows, launch.length) - 1
    blocks = cdiv(seen_ends(first, last, **sizes), count)
    running = jax.lax.fori_loop(
        0, unmasked, lambda j, r: add_block(j, r, False), running
    )
    running = jax.lax.fori_loop(
        unmasked, blocks, lambda j, r: add_block(j, r, True), running
    )
    largest, normalizer, weighted = running
    store_rows(at.o, weighted / normalizer[:, None], real=real)
    store_rows(at.lse, (largest + jnp.log2(normalizer)) / LOG2_E, real=real)
