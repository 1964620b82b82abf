"""The forward kernel on TPU: online softmax over blocks of ends, own term merged in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

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
from pallas_kernels.chunk_attention.mosaic_logits import hidden_logits, real_ends
from pallas_kernels.named_refs import by_name


def attend(launch: Launch, inputs: Inputs) -> tuple[Array, Array]:
    """Returns o [B, T, H, E] and the log-sum-exp [B, H, 1, T]."""
    tiles, H, E = launch.tiles, launch.heads, launch.width
    q, own_logits, own_values, keys, values = inputs[2:]

    def at(b, h, i, j, first):
        # A hidden block is not fetched: the place of the last seen one is repeated.
        seen = launch.blocks_of_ends(i, first[b])
        return At(b, h, i, jnp.minimum(j, jnp.maximum(seen - 1, 0)))

    o, lse = launch_kernel(
        launch,
        _forward_kernel,
        inputs.first,
        *inputs.documents,
        by_position(q),
        own_logits,
        by_position(own_values),
        keys,
        values,
        grid=(
            launch.batch,
            H,
            pl.cdiv(launch.length, tiles.block_q),
            pl.cdiv(keys.shape[2], tiles.block_k),
        ),
        parallel=3,
        in_specs=[
            *document_specs(launch, at),
            position_spec(launch, at, launch.groups),
            scalar_spec(launch, at),
            position_spec(launch, at, H),
            end_spec(launch, at),
            end_spec(launch, at),
        ],
        out_specs=[position_spec(launch, at, H), scalar_spec(launch, at)],
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
def _forward_kernel(*refs, launch: Launch):
    at = by_name(_Refs, refs, documents=2 * launch.has_documents)
    i, j = pl.program_id(2), pl.program_id(3)
    first = at.first[pl.program_id(0)]

    # 1. The softmax starts from the own term, of weight exp(0) = 1: no row is empty.
    @pl.when(j == 0)
    def _():
        at.largest[:] = launch.scale * at.own_logit[...]
        at.normalizer[:] = jnp.ones_like(at.normalizer)
        at.weighted[:] = at.own_value[...].astype(jnp.float32).T

    # 2. A block of ends that some position sees; the blocks after it are skipped. A
    # larger maximum shrinks what was summed under the old one.
    @pl.when(j < launch.blocks_of_ends(i, first))
    def _():
        q = at.q[...]
        k, v = at.keys[...].astype(q.dtype), at.values[...].astype(q.dtype)
        logits = hidden_logits(launch, k, q, first, i, j, at.documents)
        above = jnp.maximum(at.largest[...], jnp.max(logits, axis=0, keepdims=True))
        shrink = jnp.exp(at.largest[...] - above)
        p = jnp.exp(logits - above)
        at.largest[:] = above
        total = jnp.sum(p, axis=0, keepdims=True)
        at.normalizer[:] = at.normalizer[...] * shrink + total
        # Values beyond the array are undefined, and 0 times infinity is not 0.
        met = dot(real_ends(launch, v, j), p.astype(v.dtype), (0, 0))
        at.weighted[:] = at.weighted[...] * shrink + met

    # 3. After the last block: the mean, and the log-sum-exp for the gradient.
    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o = at.weighted[...] / at.normalizer[...]
        at.o[:] = o.T.astype(at.o.dtype)
        at.lse[:] = at.largest[...] + jnp.log(at.normalizer[...])
