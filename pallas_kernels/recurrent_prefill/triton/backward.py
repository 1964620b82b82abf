"""The backward of a tile on GPU: seven kernels a position."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import Prepared
from pallas_kernels.recurrent_prefill.tiles.backward import Kept, Kernels
from pallas_kernels.recurrent_prefill.tiles.gradients import Known, Sequential
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors
from pallas_kernels.recurrent_prefill.triton.attention_backward import (
    meet_later_queries,
    meet_own_tile,
    query_gradients,
)
from pallas_kernels.recurrent_prefill.triton.launch import Launch
from pallas_kernels.recurrent_prefill.triton.norms import norm_back
from pallas_kernels.recurrent_prefill.triton.products_backward import (
    pair_product_back,
    transposed_product,
)


def triton_kernels(launch: Launch) -> Kernels:
    """Returns the GPU kernels of the backward loop."""
    return Kernels(
        meet_later_queries=partial(meet_later_queries, launch),
        positions=partial(_positions_back, launch),
        query_gradients=partial(query_gradients, launch),
    )


def _positions_back(
    launch: Launch, tile: Kept, w: Prepared, known: Known, q: Array, for_k, for_v
) -> tuple[Sequential, Array]:
    """Runs through a tile's positions in reverse; returns their cotangents."""
    spec = launch.spec
    L, b, B, D = tile.x.shape
    vectors = jax.lax.optimization_barrier(Vectors.of(w, spec, D))
    of_z, of_mlp = vectors.attention_norm[0], vectors.mlp_norm[0]
    kind_z = spec.norm if spec.normed_persistent else "none"

    def position(i, carry):
        found, for_attended = carry
        t = (b - 1 - i).astype(jnp.int32).reshape(1)
        queries = (q, for_attended, tile.attended, tile.log_normalizer)
        for_k, for_v, sums = meet_own_tile(
            *(launch, t, found.keys, found.values, (known.keys, known.values)),
            *(queries, known.unit_k, vectors.k_norm[0]),
        )
        normed_z = pair_product_back(
            *(launch, t, for_k, for_v, sums, known.unit_k, known.factor_k),
            *(vectors.k_norm[0], w.w_kv, found.normed_z),
        )
        z, scaled = norm_back(
            *(launch, t, tile.for_z, normed_z, known.unit_z, known.factor_z),
            *(of_z, found.z),
            kind=kind_z,
        )
        pre = transposed_product(launch, t, scaled, w.w_down, found.pre, known.slopes)
        normed_y = transposed_product(launch, t, pre, w.w_in, found.normed_y)
        y, scaled = norm_back(
            *(launch, t, z, normed_y, known.unit_y, known.factor_y),
            *(of_mlp, found.y),
            kind=spec.norm,
        )
        for_attended = transposed_product(launch, t, scaled, w.w_out, for_attended)
        return Sequential(y, z, normed_y, normed_z, pre, for_k, for_v), for_attended

    row = jnp.zeros((L, b, B, D), jnp.float32)
    pre = jnp.zeros(known.slopes.shape, spec.dtype)
    return jax.lax.fori_loop(
        *(0, b, position),
        (Sequential(row, row, row, row, pre, for_k, for_v), jnp.zeros_like(q)),
    )
