"""The forward kernel on TPU: online softmax over blocks of ends, own term merged in."""

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


# A program owns `rows` positions of one head and runs through the blocks of ends that
# they see; maximum, normalizer and the weighted values [E, rows] stay in VMEM. They
# start from the own term. Crossing HBM: q, own term and o once, the seen ends once for
# each block of positions.
def _forward_kernel(first_ref, *refs, call: Call):
    *documents, q_ref, own_ref, value_ref, keys_ref, values_ref = refs[:-5]
    o_ref, lse_ref, largest_ref, normalizer_ref, weighted_ref = refs[-5:]
    i, j = pl.program_id(2), pl.program_id(3)
    first = first_ref[pl.program_id(0)]

    @pl.when(j == 0)
    def _():
        largest_ref[:] = call.scale * own_ref[...]
        normalizer_ref[:] = jnp.ones_like(normalizer_ref)
        weighted_ref[:] = value_ref[...].astype(jnp.float32).T

    @pl.when(j < call.blocks_of_ends(i, first))
    def _():
        q = q_ref[...]
        k, v = keys_ref[...].astype(q.dtype), values_ref[...].astype(q.dtype)
        logits = hidden_logits(call, k, q, first, i, j, documents)
        above = jnp.maximum(largest_ref[...], jnp.max(logits, axis=0, keepdims=True))
        shrink = jnp.exp(largest_ref[...] - above)
        p = jnp.exp(logits - above)
        largest_ref[:] = above
        normalizer_ref[:] = normalizer_ref[...] * shrink + jnp.sum(
            p, axis=0, keepdims=True
        )
        met = dot(real_ends(call, v, j), p.astype(v.dtype), (0, 0))
        weighted_ref[:] = weighted_ref[...] * shrink + met

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o = weighted_ref[...] / normalizer_ref[...]
        o_ref[:] = o.T.astype(o_ref.dtype)
        lse_ref[:] = largest_ref[...] + jnp.log(normalizer_ref[...])
