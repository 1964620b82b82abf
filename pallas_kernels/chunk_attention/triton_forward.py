"""The forward kernel on GPU: flash attention over chunk ends, own term merged in."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.chunk_attention.arrays import Array
from pallas_kernels.chunk_attention.triton_launch import (
    HIDDEN,
    LOG2_E,
    Call,
    dot,
    first_chunk,
    launch,
    load_rows,
    mask_specs,
    same_document,
    store_rows,
)
from pallas_kernels.chunk_attention.visibility import cdiv, seen_ends, sees


def attend(
    call: Call,
    masks: list[Array],
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B T H"],
    own_values: Float[Array, "B T H E"],
    keys: Float[Array, "B H S E"],
    values: Float[Array, "B H S E"],
):
    """Returns o [B, T, H, E] and the log-sum-exp [B, H, T]."""
    B, T, H, E = own_values.shape
    N, S, rows = call.groups, keys.shape[2], call.tiles.block_q
    blocks = cdiv(T, rows)
    # The last blocks see most ends: they start first.
    at = lambda h, i, b: (b, blocks - 1 - i)  # noqa: E731
    by_row = pl.BlockSpec((None, rows, None, E), lambda h, i, b: (*at(h, i, b), h, 0))
    of_group = pl.BlockSpec(
        (None, rows, None, E), lambda h, i, b: (*at(h, i, b), h % N, 0)
    )
    scalars = pl.BlockSpec((None, rows, None), lambda h, i, b: (*at(h, i, b), h))
    whole = pl.BlockSpec((None, None, S, E), lambda h, i, b: (b, h, 0, 0))
    lse = pl.BlockSpec((None, None, rows), lambda h, i, b: (b, h, blocks - 1 - i))
    return launch(
        call,
        _forward_kernel,
        *(*masks, q, own_logits, own_values, keys, values),
        grid=(H, blocks, B),
        in_specs=[
            *mask_specs(call, rows, at),
            *(of_group, scalars, by_row, whole, whole),
        ],
        out_specs=[by_row, lse],
        out_shape=[
            jax.ShapeDtypeStruct(own_values.shape, own_values.dtype),
            jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        ],
        # Operands of four bytes fill as many registers again.
        accumulator=rows * E * (2 if q.dtype == jnp.float32 else 1),
    )


# A program owns `rows` positions of one head, of as many chunks as they span. Their
# softmax starts from the own term and stays in registers while the ends that any of
# them sees stream by once; blocks of ends that all of them see need no mask. Crossing
# memory: q, own term and o once, the seen ends once a program.
def _forward_kernel(*refs, call: Call):
    q_ref, own_ref, value_ref, keys_ref, values_ref, o_ref, lse_ref = refs[call.masks :]
    rows, count = call.tiles.block_q, call.tiles.block_k
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * rows
    t = start + jnp.arange(rows)
    real = t < call.length
    first = first_chunk(call, refs)
    documents = load_rows(refs[call.masks - 2], real=real) if call.has_documents else t
    q = load_rows(q_ref, real=real)
    own = load_rows(own_ref, real=real).astype(jnp.float32) * (call.scale * LOG2_E)

    def add_block(j, running, masked: bool):
        largest, normalizer, weighted = running
        s = j * count + jnp.arange(count)
        part = pl.ds(j * count, count)
        k = load_rows(keys_ref.at[part, :], real=s < call.ends).astype(q.dtype)
        v = load_rows(values_ref.at[part, :], real=s < call.ends).astype(q.dtype)
        logits = dot(q, k, transposed=True) * (call.scale * LOG2_E)
        if masked:
            seen = sees(first, t[:, None], s[None, :], chunk=call.chunk)
            seen = seen & (s < call.ends)[None, :]
            if call.has_documents:
                same = same_document(call, refs, documents, j * count, count)
                seen = seen & same
            logits = jnp.where(seen, logits, HIDDEN)
        # A larger maximum shrinks what was summed under the old one.
        above = jnp.maximum(largest, jnp.max(logits, axis=1))
        shrink = jnp.exp2(largest - above)
        p = jnp.exp2(logits - above[:, None])
        normalizer = normalizer * shrink + jnp.sum(p, axis=1)
        return above, normalizer, weighted * shrink[:, None] + dot(p.astype(v.dtype), v)

    v = load_rows(value_ref, real=real).astype(jnp.float32)
    # The softmax starts from the own term, whose weight is exp(0) = 1: no row is empty.
    running = (own, jnp.ones(rows, jnp.float32), v)
    sizes = {"chunk": call.chunk, "ends": call.ends}
    # Ends before `unmasked` blocks are seen by every position of the program.
    unmasked = 0 if call.has_documents else seen_ends(first, start, **sizes) // count
    last = jnp.minimum(start + rows, call.length) - 1
    blocks = cdiv(seen_ends(first, last, **sizes), count)
    running = jax.lax.fori_loop(
        0, unmasked, lambda j, r: add_block(j, r, False), running
    )
    running = jax.lax.fori_loop(
        unmasked, blocks, lambda j, r: add_block(j, r, True), running
    )
    largest, normalizer, weighted = running
    store_rows(o_ref, weighted / normalizer[:, None], real=real)
    store_rows(lse_ref, (largest + jnp.log2(normalizer)) / LOG2_E, real=real)
