"""The gradient's two kernels on TPU: by blocks of positions, and by blocks of ends."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from pallas_kernels.chunk_attention.arrays import Array
from pallas_kernels.chunk_attention.mosaic_launch import (
    At,
    Call,
    by_position,
    document_specs,
    dot,
    end_spec,
    from_position,
    launch,
    position_spec,
    scalar_spec,
    shape_by_position,
)
from pallas_kernels.chunk_attention.mosaic_logits import (
    hidden_logits,
    real_ends,
    real_rows,
)


def position_gradients(
    call: Call,
    first: Int[Array, " B"],
    documents: list[Array],
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B H 1 T"],
    own_values: Float[Array, "B T H E"],
    keys: Float[Array, "B H S E"],
    values: Float[Array, "B H S E"],
    o: Float[Array, "B T H E"],
    lse: Float[Array, "B H 1 T"],
    do: Float[Array, "B T H E"],
) -> tuple[Array, Array, Array, Array]:
    """Returns (dq, d own_logits [B, H, 1, T], d own_values, delta [B, H, 1, T]).

    delta is sum(do * o), for `end_gradients`.
    """
    tiles, N, H, E = call.tiles, call.groups, call.heads, call.width

    def at(b, n, i, g, j, first):
        seen = call.blocks_of_ends(i, first[b])
        return At(b, n + g * N, i, jnp.minimum(j, jnp.maximum(seen - 1, 0)))

    by_row, of_group = position_spec(call, at, H), position_spec(call, at, N)
    scalars = scalar_spec(call, at)
    dq, d_own, d_value, delta = launch(
        call,
        _position_kernel,
        first,
        *documents,
        *(by_position(q), own_logits, by_position(own_values), keys, values),
        *(by_position(o), lse, by_position(do)),
        grid=(
            *(call.batch, N, pl.cdiv(call.length, tiles.block_q)),
            *(H // N, pl.cdiv(keys.shape[2], tiles.block_k)),
        ),
        parallel=3,
        in_specs=[
            *document_specs(call, at),
            *(of_group, scalars, by_row, end_spec(call, at), end_spec(call, at)),
            *(by_row, scalars, by_row),
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
    call: Call,
    first: Int[Array, " B"],
    documents: list[Array],
    q: Float[Array, "B T N E"],
    keys: Float[Array, "B H S E"],
    values: Float[Array, "B H S E"],
    lse: Float[Array, "B H 1 T"],
    delta: Float[Array, "B H 1 T"],
    do: Float[Array, "B T H E"],
) -> tuple[Array, Array]:
    """Returns (d keys, d values), both [B, H, S, E]."""
    tiles, H, E = call.tiles, call.heads, call.width
    blocks = pl.cdiv(call.length, tiles.block_q)

    def at(b, h, j, i, first):
        seen = jnp.minimum(call.first_block(j, first[b]), blocks - 1)
        return At(b, h, jnp.maximum(i, seen), j)

    ends, scalars = end_spec(call, at), scalar_spec(call, at)
    d_keys, d_values = launch(
        call,
        _end_kernel,
        first,
        *documents,
        *(by_position(q), keys, values, lse, delta, by_position(do)),
        grid=(call.batch, H, pl.cdiv(keys.shape[2], tiles.block_k), blocks),
        parallel=3,
        in_specs=[
            *document_specs(call, at),
            *(position_spec(call, at, call.groups), ends, ends),
            *(scalars, scalars, position_spec(call, at, H)),
        ],
        out_specs=[ends, ends],
        out_shape=[
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        scratch=[(tiles.block_k, E), (tiles.block_k, E)],
    )
    return d_keys, d_values


# A program owns `rows` positions of a query group, and runs through its heads and, for
# each, the blocks of ends that they see: dq [E, rows] stays in VMEM throughout. A
# head's first step makes delta and the own term's gradients. Crossing HBM: q and dq
# once; own term, o, do and their gradients once; the seen ends once a block.
def _position_kernel(first_ref, *refs, call: Call):
    *documents, q_ref, own_ref, value_ref, keys_ref, values_ref = refs[:-9]
    o_ref, lse_ref, do_ref, dq_ref, d_own_ref, d_value_ref = refs[-9:-3]
    delta_ref, sum_ref, delta_kept_ref = refs[-3:]
    i, g, j = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    first = first_ref[pl.program_id(0)]

    @pl.when((g == 0) & (j == 0))
    def _():
        sum_ref[:] = jnp.zeros_like(sum_ref)

    # A head's first step: what needs no chunk end. delta = sum(do * o) is every
    # softmax gradient's common part; the own term's weight follows from lse.
    @pl.when(j == 0)
    def _():
        do = do_ref[...].astype(jnp.float32).T  # [E, rows]
        o, value = (ref[...].astype(jnp.float32).T for ref in (o_ref, value_ref))
        delta = jnp.sum(do * o, axis=0, keepdims=True)
        weight = jnp.exp(call.scale * own_ref[...] - lse_ref[...])
        of_value = jnp.sum(do * value, axis=0, keepdims=True)
        d_own_ref[:] = call.scale * weight * (of_value - delta)
        d_value_ref[:] = (weight * do).T.astype(d_value_ref.dtype)
        delta_ref[:] = delta
        delta_kept_ref[:] = delta

    # A block of ends: the weights again from lse, then dq += k^T p (dp - delta).
    # Blocks after the last seen one are skipped.
    @pl.when(j < call.blocks_of_ends(i, first))
    def _():
        q = q_ref[...]
        k = real_ends(call, keys_ref[...].astype(q.dtype), j)
        v = real_ends(call, values_ref[...].astype(q.dtype), j)
        logits = hidden_logits(call, k, q, first, i, j, documents)
        p = jnp.exp(logits - lse_ref[...])
        dp = dot(v, do_ref[...].astype(q.dtype), (1, 1))
        d_logits = (p * (dp - delta_kept_ref[...])).astype(q.dtype)
        sum_ref[:] += dot(k, d_logits, (0, 0))

    @pl.when((g == pl.num_programs(3) - 1) & (j == pl.num_programs(4) - 1))
    def _():
        dq_ref[:] = (call.scale * sum_ref[...]).T.astype(dq_ref.dtype)


# A program owns a block of ends of one head and runs through the blocks of positions
# that see any of them; both gradients stay in VMEM. Crossing HBM: the ends and their
# gradients once; q, do and two numbers a position once for each block of ends.
def _end_kernel(first_ref, *refs, call: Call):
    *documents, q_ref, keys_ref, values_ref, lse_ref, delta_ref, do_ref = refs[:-4]
    d_keys_ref, d_values_ref, sum_k_ref, sum_v_ref = refs[-4:]
    j, i = pl.program_id(2), pl.program_id(3)
    first = first_ref[pl.program_id(0)]

    @pl.when(i == 0)
    def _():
        sum_k_ref[:] = jnp.zeros_like(sum_k_ref)
        sum_v_ref[:] = jnp.zeros_like(sum_v_ref)

    # Blocks of positions before the first that sees an end of this block are skipped.
    @pl.when(i >= call.first_block(j, first))
    def _():
        q = real_rows(call, q_ref[...], i, 0)
        do = real_rows(call, do_ref[...].astype(q.dtype), i, 0)
        k, v = keys_ref[...].astype(q.dtype), values_ref[...].astype(q.dtype)
        logits = hidden_logits(call, k, q, first, i, j, documents)
        p = real_rows(call, jnp.exp(logits - lse_ref[...]), i, 1)
        dp = dot(v, do, (1, 1))
        d_logits = p * (dp - real_rows(call, delta_ref[...], i, 1))
        sum_k_ref[:] += dot(d_logits.astype(q.dtype), q, (1, 0))
        sum_v_ref[:] += dot(p.astype(q.dtype), do, (1, 0))

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        d_keys_ref[:] = (call.scale * sum_k_ref[...]).astype(d_keys_ref.dtype)
        d_values_ref[:] = sum_v_ref[...].astype(d_values_ref.dtype)
