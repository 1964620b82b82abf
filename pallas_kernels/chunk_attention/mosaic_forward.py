"""The forward kernel on TPU: online softmax over blocks of ends, own term merged in."""

from typing import Any, NamedTuple

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
from pallas_kernels.chunk_attention.mosaic_logits import hidden_logits, real_ends
from pallas_kernels.named_refs import by_name


def attend(
    call: Call,
    first: Int[Array, " B"],
    documents: list[Array],
    q: Float[Array, "B T N E"],
    own_logits: Float[Array, "B H 1 T"],
    own_values: Float[Array, "B T H E"],
    keys: Float[Array, "B H S E"],
    values: Float[Array, "B H S E"],
) -> tuple[Array, Array]:
    """Returns o [B, T, H, E] and the log-sum-exp [B, H, 1, T].

    Args:
      own_logits: [B, H, 1, T], float32.
      documents: see `document_arrays`.
    """
    tiles, H, E = call.tiles, call.heads, call.width

    def at(b, h, i, j, first):
        # A hidden block is not fetched: the place of the last seen one is repeated.
        seen = call.blocks_of_ends(i, first[b])
        return At(b, h, i, jnp.minimum(j, jnp.maximum(seen - 1, 0)))

    o, lse = launch(
        call,
        _forward_kernel,
        first,
        *documents,
        *(by_position(q), own_logits, by_position(own_values), keys, values),
        grid=(
            *(call.batch, H, pl.cdiv(call.length, tiles.block_q)),
            pl.cdiv(keys.shape[2], tiles.block_k),
        ),
        parallel=3,
        in_specs=[
            *document_specs(call, at),
            position_spec(call, at, call.groups),
            scalar_spec(call, at),
            position_spec(call, at, H),
            *(end_spec(call, at), end_spec(call, at)),
        ],
        out_specs=[position_spec(call, at, H), scalar_spec(call, at)],
        out_shape=[
            shape_by_position(own_values),
            jax.ShapeDtypeStruct(own_logits.shape, jnp.float32),
        ],
        scratch=[(1, tiles.block_q), (1, tiles.block_q), (E, tiles.block_q)],
    )
    return from_position(o, H), lse


class _Refs(NamedTuple):
    """References of the kernel."""

    first: Any  # int32 [B], in scalar memory: the number of each row's first chunk
    documents: tuple[Any, ...]  # of positions [1, rows] and of ends [ends, 1], or none
    q: Any  # [rows, E]
    own_logit: Any  # [1, rows]
    own_value: Any  # [rows, E]
    keys: Any  # [ends, E]
    values: Any  # [ends, E]
    o: Any  # out, [rows, E]
    lse: Any  # out, [1, rows]
    largest: Any  # scratch, float32 [1, rows]: the maximum so far
    normalizer: Any  # scratch, float32 [1, rows]
    weighted: Any  # scratch, float32 [E, rows]: the weighted sum of values so far


# A program owns `rows` positions of one head and runs through the blocks of ends that
# they see; maximum, normalizer and the weighted values [E, rows] stay in VMEM. They
# start from the own term. Crossing HBM: q, own term and o once, the seen ends once for
# each block of positions.
def _forward_kernel(*refs, call: Call):
    at = by_name(_Refs, refs, documents=2 * call.has_documents)
    i, j = pl.program_id(2), pl.program_id(3)
    first = at.first[pl.program_id(0)]

    # 1. The softmax starts from the own term, of weight exp(0) = 1: no row is empty.
    @pl.when(j == 0)
    def _():
        at.largest[:] = call.scale * at.own_logit[...]
        at.normalizer[:] = jnp.ones_like(at.normalizer)
        at.weighted[:] = at.own_value[...].astype(jnp.float32).T

    # 2. A block of ends that some position sees; the blocks after it are skipped. A
    # larger maximum shrinks what was summed under the old one.
    @pl.when(j < call.blocks_of_ends(i, first))
    def _():
        q = at.q[...]
        k, v = at.keys[...].astype(q.dtype), at.values[...].astype(q.dtype)
        logits = hidden_logits(call, k, q, first, i, j, at.documents)
        above = jnp.maximum(at.largest[...], jnp.max(logits, axis=0, keepdims=True))
        shrink = jnp.exp(at.largest[...] - above)
        p = jnp.exp(logits - above)
        at.largest[:] = above
        total = jnp.sum(p, axis=0, keepdims=True)
        at.normalizer[:] = at.normalizer[...] * shrink + total
        # Beyond the array values may be anything, and 0 times infinity is no 0.
        met = dot(real_ends(call, v, j), p.astype(v.dtype), (0, 0))
        at.weighted[:] = at.weighted[...] * shrink + met

    # 3. After the last block: the mean, and the log-sum-exp for the gradient.
    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o = at.weighted[...] / at.normalizer[...]
        at.o[:] = o.T.astype(at.o.dtype)
        at.lse[:] = at.largest[...] + jnp.log(at.normalizer[...])
