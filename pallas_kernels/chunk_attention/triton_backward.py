"""The gradient's two kernels on GPU: by blocks of positions, and by blocks of ends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.chunk_attention.call import Array, ChunkAttentionCall
from pallas_kernels.chunk_attention.triton_launch import (
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
from pallas_kernels.chunk_attention.visibility import (
    cdiv,
    first_position,
    seen_ends,
    sees,
)
from pallas_kernels.named_refs import by_name


def position_gradients(
    launch: Launch,
    call: ChunkAttentionCall,
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H E"],
):
    """Returns (dq [P, B, T, N, E] in P parts, d own_logits, d own_values, delta).

    delta [B, H, T] is sum(do * o), for `end_gradients`. The call has at least one end.
    """
    q, own_logits, own_values, (keys, values, _) = call[:4]
    B, T, H, E = own_values.shape
    N, rows, P = launch.groups, launch.tiles.block_q, launch.tiles.splits
    S = keys.shape[2]
    blocks = cdiv(T, rows)
    at = lambda n, i, b: (b, blocks - 1 - i)  # noqa: E731
    by_row = pl.BlockSpec((None, rows, H, E), lambda n, i, b: (b, blocks - 1 - i, 0, 0))
    of_group = pl.BlockSpec(
        (None, rows, None, E), lambda n, i, b: (b, blocks - 1 - i, n % N, 0)
    )
    part = pl.BlockSpec(
        (None, None, rows, None, E),
        lambda n, i, b: (n // N, b, blocks - 1 - i, n % N, 0),
    )
    scalars = pl.BlockSpec((None, rows, H), lambda n, i, b: (b, blocks - 1 - i, 0))
    all_keys = pl.BlockSpec((None, H, S, E), lambda n, i, b: (b, 0, 0, 0))
    by_head = pl.BlockSpec((None, H, rows), lambda n, i, b: (b, 0, blocks - 1 - i))
    return launch_kernel(
        launch,
        _position_kernel,
        *mask_arrays(call),
        q,
        own_logits,
        own_values,
        keys,
        values,
        o,
        lse,
        do,
        grid=(N * P, blocks, B),
        in_specs=[
            *mask_specs(launch, rows, at),
            of_group,
            scalars,
            by_row,
            all_keys,
            all_keys,
            by_row,
            by_head,
            by_row,
        ],
        out_specs=[part, scalars, by_row, by_head],
        out_shape=[
            jax.ShapeDtypeStruct((P, B, T, N, E), q.dtype if P == 1 else jnp.float32),
            jax.ShapeDtypeStruct(own_logits.shape, jnp.float32),
            jax.ShapeDtypeStruct(own_values.shape, own_values.dtype),
            jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        ],
        accumulator=2 * rows * E,
        products=3,  # q k^T, do v^T, d_logits k
        pairs=computed_pairs(launch, block_q=rows, block_k=launch.tiles.block_k),
    )


def end_gradients(
    launch: Launch,
    call: ChunkAttentionCall,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    do: Float[Array, "B T H E"],
):
    """Returns (d keys, d values), both [B, H, S, E]."""
    q, keys, values = call.q, call.ends.keys, call.ends.values
    B, T, H, E = do.shape
    N, S, count = launch.groups, launch.ends, launch.tiles.backward_block_k
    at = lambda h, j, b: (b, 0)  # noqa: E731
    of_group = pl.BlockSpec((None, T, None, E), lambda h, j, b: (b, 0, h % N, 0))
    by_row = pl.BlockSpec((None, T, None, E), lambda h, j, b: (b, 0, h, 0))
    by_head = pl.BlockSpec((None, None, T), lambda h, j, b: (b, h, 0))
    block = pl.BlockSpec((None, None, count, E), lambda h, j, b: (b, h, j, 0))
    return launch_kernel(
        launch,
        _end_kernel,
        *mask_arrays(call),
        q,
        keys,
        values,
        lse,
        delta,
        do,
        grid=(H, cdiv(S, count), B),
        in_specs=[
            *mask_specs(launch, T, at),
            of_group,
            block,
            block,
            by_head,
            by_head,
            by_row,
        ],
        out_specs=[block, block],
        out_shape=[
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        accumulator=2 * count * E,
        products=4,  # k q^T, v do^T, d_logits q, p do
        pairs=computed_pairs(
            launch, block_q=launch.tiles.backward_block_q, block_k=count
        ),
    )


class _PositionRefs(NamedTuple):
    """References of `_position_kernel`; a mask is a tuple of one, or empty."""

    first: tuple[Any, ...]  # [1]: the row's number of its first chunk
    documents: tuple[Any, ...]  # [rows]
    end_documents: tuple[Any, ...]  # [S]
    q: Any  # [rows, E], of one query group
    own_logits: Any  # [rows, H]
    own_values: Any  # [rows, H, E]
    keys: Any  # [H, S, E]
    values: Any  # [H, S, E]
    o: Any  # [rows, H, E]
    lse: Any  # [H, rows]
    do: Any  # [rows, H, E]
    dq: Any  # out, [rows, E]: the program's heads' part
    d_own_logits: Any  # out, [rows, H]
    d_own_values: Any  # out, [rows, H, E]
    delta: Any  # out, [H, rows]


# A program owns `rows` positions of a query group, and some of its heads one after the
# other: dq stays in registers and is written once. For each head it makes delta and the
# own term's gradients, then runs over the ends that are seen, as the forward kernel
# does. Crossing memory: q and dq once; own term, o, do and their gradients once; ends
# once per program.
def _position_kernel(*refs, launch: Launch):
    at = by_name(_PositionRefs, refs, **launch.masks)
    rows, count = launch.tiles.block_q, launch.tiles.block_k
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * rows
    t = start + jnp.arange(rows)
    real = t < launch.length
    first = first_chunk(at)
    documents = load_rows(at.documents[0], real=real) if at.documents else t
    q = load_rows(at.q, real=real)
    # Blocks of ends that every position sees, and those that any of them sees.
    sizes = {"chunk": launch.chunk, "ends": launch.ends}
    unmasked = 0 if launch.has_documents else seen_ends(first, start, **sizes) // count
    last = jnp.minimum(start + rows, launch.length) - 1
    blocks = cdiv(seen_ends(first, last, **sizes), count)
    # The grid's first axis counts groups first, then the programs that share a group.
    here = launch.heads // launch.groups // launch.tiles.splits
    group, part = pl.program_id(0) % launch.groups, pl.program_id(0) // launch.groups

    def head(g, dq):
        h = group + launch.groups * (part * here + g)
        # 1. What needs no chunk end: delta, and the own term's gradients.
        do = load_rows(at.do.at[:, h, :], real=real)
        wide = do.astype(jnp.float32)
        delta = jnp.sum(wide * load_rows(at.o.at[:, h, :], real=real), axis=1)
        lse = load_rows(at.lse.at[h, :], real=real) * LOG2_E
        own_logit = load_rows(at.own_logits.at[:, h], real=real).astype(jnp.float32)
        # Its weight follows from lse, its gradients from delta.
        weight = jnp.exp2(own_logit * (launch.scale * LOG2_E) - lse)
        value = load_rows(at.own_values.at[:, h, :], real=real)
        of_value = jnp.sum(wide * value, axis=1)
        store_rows(at.delta.at[h, :], delta, real=real)
        d_own = launch.scale * weight * (of_value - delta)
        store_rows(at.d_own_logits.at[:, h], d_own, real=real)
        store_rows(at.d_own_values.at[:, h, :], weight[:, None] * wide, real=real)
        do = do.astype(q.dtype)

        def add_block(j, dq, masked: bool):
            s = j * count + jnp.arange(count)
            slots = pl.ds(j * count, count)
            k = load_rows(at.keys.at[h, slots, :], real=s < launch.ends).astype(q.dtype)
            v = load_rows(at.values.at[h, slots, :], real=s < launch.ends)
            # Recompute the weights from the saved lse, without another maximum.
            logits = dot(q, k, transposed=True) * (launch.scale * LOG2_E)
            p = jnp.exp2(logits - lse[:, None])
            if masked:
                seen = sees(first, t[:, None], s[None, :], chunk=launch.chunk)
                if launch.has_documents:
                    same = same_document(launch, at, documents, j * count, count)
                    seen = seen & same
                p = jnp.where(seen & (s < launch.ends)[None, :], p, 0.0)
            dp = dot(do, v.astype(q.dtype), transposed=True)
            d_logits = p * (dp - delta[:, None])
            return dq + dot(d_logits.astype(k.dtype), k)

        # 2. The ends: seen by all, without a mask; then those on the diagonal.
        plain = lambda j, d: add_block(j, d, masked=False)  # noqa: E731
        checked = lambda j, d: add_block(j, d, masked=True)  # noqa: E731
        dq = jax.lax.fori_loop(0, unmasked, plain, dq)
        return jax.lax.fori_loop(unmasked, blocks, checked, dq)

    dq = jax.lax.fori_loop(0, here, head, jnp.zeros(q.shape, jnp.float32))
    store_rows(at.dq, launch.scale * dq, real=real)


class _EndRefs(NamedTuple):
    """References of `_end_kernel`; a mask is a tuple of one, or empty."""

    first: tuple[Any, ...]  # [1]: the row's number of its first chunk
    documents: tuple[Any, ...]  # [T]
    end_documents: tuple[Any, ...]  # [S]
    q: Any  # [T, E], of the head's query group
    keys: Any  # [ends, E]
    values: Any  # [ends, E]
    lse: Any  # [T]
    delta: Any  # [T]
    do: Any  # [T, E]
    d_keys: Any  # out, [ends, E]
    d_values: Any  # out, [ends, E]


# A program owns `backward_block_k` ends of one head. Their gradients stay in registers
# while the positions that see any of them stream by once; positions from which all of
# them are seen need no mask. Logits are transposed, [ends, rows], so that no product
# has to turn them. Crossing memory: the ends and their gradients once, q, do and two
# numbers per position once per program.
def _end_kernel(*refs, launch: Launch):
    at = by_name(_EndRefs, refs, **launch.masks)
    rows, count = launch.tiles.backward_block_q, launch.tiles.backward_block_k
    start = pl.program_id(1) * count
    s = start + jnp.arange(count)
    there = s < launch.ends
    first = first_chunk(at)
    dtype = at.q.dtype
    k = load_rows(at.keys, real=there).astype(dtype)
    v = load_rows(at.values, real=there).astype(dtype)

    def add_block(i, sums, masked: bool):
        dk, dv = sums
        t = i * rows + jnp.arange(rows)
        real = t < launch.length
        part = pl.ds(i * rows, rows)
        q = load_rows(at.q.at[part, :], real=real)
        do = load_rows(at.do.at[part, :], real=real).astype(dtype)
        lse = load_rows(at.lse.at[part], real=real) * LOG2_E
        delta = load_rows(at.delta.at[part], real=real)
        # The weights again, from the kept lse, one row an end.
        logits = dot(k, q, transposed=True) * (launch.scale * LOG2_E)
        p = jnp.exp2(logits - lse[None, :])
        if masked:
            seen = sees(first, t[None, :], s[:, None], chunk=launch.chunk)
            if launch.has_documents:
                documents = load_rows(at.documents[0].at[part], real=real)
                same = same_document(launch, at, documents, start, count)
                seen = seen & same.T
            p = jnp.where(seen, p, 0.0)
        dp = dot(v, do, transposed=True)
        d_logits = (p * (dp - delta[None, :])).astype(dtype)
        return dk + dot(d_logits, q), dv + dot(p.astype(dtype), do)

    # Positions before `low` see none of these ends, those from `high` on see all.
    blocks = cdiv(launch.length, rows)
    low = first_position(first, start, chunk=launch.chunk) // rows
    high = first_position(first, start + count - 1, chunk=launch.chunk)
    high = blocks if launch.has_documents else jnp.minimum(cdiv(high, rows), blocks)
    sums = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32))
    plain = lambda i, d: add_block(i, d, masked=False)  # noqa: E731
    checked = lambda i, d: add_block(i, d, masked=True)  # noqa: E731
    sums = jax.lax.fori_loop(low, high, checked, sums)
    # Positions past the last have q = do = delta = 0 and add nothing.
    dk, dv = jax.lax.fori_loop(high, blocks, plain, sums)
    store_rows(at.d_keys, launch.scale * dk, real=there)
    store_rows(at.d_values, dv, real=there)
