"""The gradient's two kernels on TPU: by blocks of positions, and by blocks of ends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_kernels.chunk_attention.call import Array
from pallas_kernels.chunk_attention.mosaic_launch import (
    At,
    Inputs,
    Launch,
    by_position,
    document_specs,
    dot,
    end_spec,
    from_position,
    launch_kernel,
    position_spec,
    scalar_spec,
    shape_by_position,
)
from pallas_kernels.chunk_attention.mosaic_logits import (
    hidden_logits,
    real_ends,
    real_rows,
)
from pallas_kernels.named_refs import by_name


def position_gradients(
    launch: Launch,
    inputs: Inputs,
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B H 1 T"],
    do: Float[Array, "B T H E"],
) -> tuple[Array, Array, Array, Array]:
    """Returns (dq, d own_logits [B, H, 1, T], d own_values, delta [B, H, 1, T]).

    delta is sum(do * o), for `end_gradients`.
    """
    tiles, N, H, E = launch.tiles, launch.groups, launch.heads, launch.width
    q, own_logits, own_values, keys, values = inputs[2:]

    def at(b, n, i, g, j, first):
        seen = launch.blocks_of_ends(i, first[b])
        return At(b, n + g * N, i, jnp.minimum(j, jnp.maximum(seen - 1, 0)))

    by_row, of_group = position_spec(launch, at, H), position_spec(launch, at, N)
    scalars = scalar_spec(launch, at)
    dq, d_own, d_value, delta = launch_kernel(
        launch,
        _position_kernel,
        inputs.first,
        *inputs.documents,
        by_position(q),
        own_logits,
        by_position(own_values),
        keys,
        values,
        by_position(o),
        lse,
        by_position(do),
        grid=(
            launch.batch,
            N,
            pl.cdiv(launch.length, tiles.block_q),
            H // N,
            pl.cdiv(keys.shape[2], tiles.block_k),
        ),
        parallel=3,
        in_specs=[
            *document_specs(launch, at),
            of_group,
            scalars,
            by_row,
            end_spec(launch, at),
            end_spec(launch, at),
            by_row,
            scalars,
            by_row,
        ],
        out_specs=[of_group, scalars, by_row, scalars],
        out_shape=[
            shape_by_position(q),
            jax.ShapeDtypeStruct(own_logits.shape, jnp.float32),
            shape_by_position(own_values),
            jax.ShapeDtypeStruct(own_logits.shape, jnp.float32),
        ],
        scratch=[(E, tiles.block_q), (1, tiles.block_q)],
    )
    return from_position(dq, N), d_own, from_position(d_value, H), delta


def end_gradients(
    launch: Launch,
    inputs: Inputs,
    lse: Float[Array, "B H 1 T"],
    delta: Float[Array, "B H 1 T"],
    do: Float[Array, "B T H E"],
) -> tuple[Array, Array]:
    """Returns (d keys, d values), both [B, H, S, E]."""
    tiles, H, E = launch.tiles, launch.heads, launch.width
    keys, values = inputs.keys, inputs.values
    blocks = pl.cdiv(launch.length, tiles.block_q)

    def at(b, h, j, i, first):
        seen = jnp.minimum(launch.first_block(j, first[b]), blocks - 1)
        return At(b, h, jnp.maximum(i, seen), j)

    ends, scalars = end_spec(launch, at), scalar_spec(launch, at)
    d_keys, d_values = launch_kernel(
        launch,
        _end_kernel,
        inputs.first,
        *inputs.documents,
        by_position(inputs.q),
        keys,
        values,
        lse,
        delta,
        by_position(do),
        grid=(launch.batch, H, pl.cdiv(keys.shape[2], tiles.block_k), blocks),
        parallel=3,
        in_specs=[
            *document_specs(launch, at),
            position_spec(launch, at, launch.groups),
            ends,
            ends,
            scalars,
            scalars,
            position_spec(launch, at, H),
        ],
        out_specs=[ends, ends],
        out_shape=[
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        scratch=[(tiles.block_k, E), (tiles.block_k, E)],
    )
    return d_keys, d_values


class _PositionRefs(NamedTuple):
    """References of `_position_kernel`."""

    first: Any  # int32 [B], in scalar memory: the number of each row's first chunk
    documents: tuple[Any, ...]  # of positions [1, rows] and of ends [ends, 1], or none
    q: Any  # [rows, E], of the query group
    own_logit: Any  # [1, rows], of the head
    own_value: Any  # [rows, E]
    keys: Any  # [ends, E]
    values: Any  # [ends, E]
    o: Any  # [rows, E]
    lse: Any  # [1, rows]
    do: Any  # [rows, E]
    dq: Any  # out, [rows, E]: over all heads of the group
    d_own_logit: Any  # out, [1, rows]
    d_own_value: Any  # out, [rows, E]
    delta: Any  # out, [1, rows]
    dq_sum: Any  # scratch, float32 [E, rows]
    delta_kept: Any  # scratch, float32 [1, rows]: outputs are not read back


# A program owns `rows` positions of a query group, and runs through its heads and, for
# each, the blocks of ends that they see: dq [E, rows] stays in VMEM throughout. A
# head's first step makes delta and the own term's gradients. Crossing HBM: q and dq
# once; own term, o, do and their gradients once; the seen ends once a block.
def _position_kernel(*refs, launch: Launch):
    at = by_name(_PositionRefs, refs, documents=2 * launch.has_documents)
    i, g, j = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    first = at.first[pl.program_id(0)]

    # 1. The group's first head begins the sum that all of its heads add to.
    @pl.when((g == 0) & (j == 0))
    def _():
        at.dq_sum[:] = jnp.zeros_like(at.dq_sum)

    # 2. A head's first step: what needs no chunk end. delta = sum(do * o) is every
    # softmax gradient's common part; the own term's weight follows from lse.
    @pl.when(j == 0)
    def _():
        do = at.do[...].astype(jnp.float32).T  # [E, rows]
        o, value = (ref[...].astype(jnp.float32).T for ref in (at.o, at.own_value))
        delta = jnp.sum(do * o, axis=0, keepdims=True)
        weight = jnp.exp(launch.scale * at.own_logit[...] - at.lse[...])
        of_value = jnp.sum(do * value, axis=0, keepdims=True)
        at.d_own_logit[:] = launch.scale * weight * (of_value - delta)
        at.d_own_value[:] = (weight * do).T.astype(at.d_own_value.dtype)
        at.delta[:] = delta
        at.delta_kept[:] = delta

    # 3. A block of ends: the weights again from lse, then dq += k^T p (dp - delta).
    # Blocks after the last seen one are skipped.
    @pl.when(j < launch.blocks_of_ends(i, first))
    def _():
        q = at.q[...]
        k = real_ends(launch, at.keys[...].astype(q.dtype), j)
        v = real_ends(launch, at.values[...].astype(q.dtype), j)
        logits = hidden_logits(launch, k, q, first, i, j, at.documents)
        p = jnp.exp(logits - at.lse[...])
        dp = dot(v, at.do[...].astype(q.dtype), (1, 1))
        d_logits = (p * (dp - at.delta_kept[...])).astype(q.dtype)
        at.dq_sum[:] += dot(k, d_logits, (0, 0))

    # 4. After the group's last head.
    @pl.when((g == pl.num_programs(3) - 1) & (j == pl.num_programs(4) - 1))
    def _():
        at.dq[:] = (launch.scale * at.dq_sum[...]).T.astype(at.dq.dtype)


class _EndRefs(NamedTuple):
    """References of `_end_kernel`."""

    first: Any  # int32 [B], in scalar memory: the number of each row's first chunk
    documents: tuple[Any, ...]  # of positions [1, rows] and of ends [ends, 1], or none
    q: Any  # [rows, E], of the head's query group
    keys: Any  # [ends, E]
    values: Any  # [ends, E]
    lse: Any  # [1, rows]
    delta: Any  # [1, rows]
    do: Any  # [rows, E]
    d_keys: Any  # out, [ends, E]
    d_values: Any  # out, [ends, E]
    dk_sum: Any  # scratch, float32 [ends, E]
    dv_sum: Any  # scratch, float32 [ends, E]


# A program owns a block of ends of one head and runs through the blocks of positions
# that see any of them; both gradients stay in VMEM. Crossing HBM: the ends and their
# gradients once; q, do and two numbers per position once for each block of ends.
def _end_kernel(*refs, launch: Launch):
    at = by_name(_EndRefs, refs, documents=2 * launch.has_documents)
    j, i = pl.program_id(2), pl.program_id(3)
    first = at.first[pl.program_id(0)]

    @pl.when(i == 0)
    def _():
        at.dk_sum[:] = jnp.zeros_like(at.dk_sum)
        at.dv_sum[:] = jnp.zeros_like(at.dv_sum)

    # The weights again from lse, then dv += p do and dk += p (dp - delta) q. Blocks of
    # positions before the first that sees an end of this block are skipped.
    @pl.when(i >= launch.first_block(j, first))
    def _():
        # Every factor of a position beyond the array is zeroed: it may be anything.
        q = real_rows(launch, at.q[...], i, 0)
        do = real_rows(launch, at.do[...].astype(q.dtype), i, 0)
        k, v = at.keys[...].astype(q.dtype), at.values[...].astype(q.dtype)
        logits = hidden_logits(launch, k, q, first, i, j, at.documents)
        p = real_rows(launch, jnp.exp(logits - at.lse[...]), i, 1)
        dp = dot(v, do, (1, 1))
        d_logits = p * (dp - real_rows(launch, at.delta[...], i, 1))
        at.dk_sum[:] += dot(d_logits.astype(q.dtype), q, (1, 0))
        at.dv_sum[:] += dot(p.astype(q.dtype), do, (1, 0))

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        at.d_keys[:] = (launch.scale * at.dk_sum[...]).astype(at.d_keys.dtype)
        at.d_values[:] = at.dv_sum[...].astype(at.d_values.dtype)
