"""The backward of a tile on GPU: seven kernels a position."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import Prepared, linear
from pallas_kernels.recurrent_prefill.tiles.backward import Kept, Kernels
from pallas_kernels.recurrent_prefill.tiles.gradients import Known, PositionGradients
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors
from pallas_kernels.recurrent_prefill.triton.attention_backward import (
    later_queries_backward,
    own_tile_backward,
    queries_backward,
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
        later_queries_backward=partial(later_queries_backward, launch),
        positions_backward=partial(_positions_back, launch),
        queries_backward=partial(queries_backward, launch),
    )


def _positions_back(
    launch: Launch, tile: Kept, w: Prepared, known: Known, q: Array, dk, dv
) -> tuple[PositionGradients, Array]:
    """Runs through a tile's positions in reverse; returns their cotangents."""
    spec = launch.spec
    L, b, B, D = tile.x.shape
    vectors = jax.lax.optimization_barrier(Vectors.of(w, spec, D))
    attention_scale, mlp_scale = vectors.attention_norm[0], vectors.mlp_norm[0]
    kind_z = spec.norm if spec.normed_persistent else "none"
    w_k = w.w_kv[..., : w.w_kv.shape[2] // 2]
    turned = linear(known.unit_k, w_k.swapaxes(1, 2))
    level = jnp.sum(w_k.astype(jnp.float32), axis=2)

    def position(i, carry):
        found, do, delta = carry
        t = (b - 1 - i).astype(jnp.int32).reshape(1)
        queries = (q, do, tile.attended, tile.lse)
        dk, dv, sums, pair, delta = own_tile_backward(
            *(launch, t, found.dk, found.dv, (known.keys, known.values)),
            *(queries, known.unit_k, known.factor_k, vectors.k_norm[0], delta),
        )
        dnormed_z = pair_product_back(
            *(launch, t, pair, sums, known.factor_k),
            *(w.w_kv, turned, level, found.dnormed_z),
        )
        dz, scaled = norm_back(
            *(launch, t, tile.dz, dnormed_z, known.unit_z, known.factor_z),
            *(attention_scale, found.dz),
            kind=kind_z,
        )
        dpre = transposed_product(launch, t, scaled, w.w_down, found.dpre, known.slopes)
        dnormed_y = transposed_product(launch, t, dpre, w.w_in, found.dnormed_y)
        dy, scaled = norm_back(
            *(launch, t, dz, dnormed_y, known.unit_y, known.factor_y),
            *(mlp_scale, found.dy),
            kind=spec.norm,
        )
        do = transposed_product(launch, t, scaled, w.w_out, do)
        found = PositionGradients(dy, dz, dnormed_y, dnormed_z, dpre, dk, dv)
        return found, do, delta

    unwritten = launch.unwritten
    row = lambda: unwritten(tile.x.shape, jnp.float32)  # noqa: E731
    pre = unwritten(known.slopes.shape, spec.dtype)
    carry = (
        PositionGradients(row(), row(), row(), row(), pre, dk, dv),
        unwritten(q.shape, q.dtype),
        unwritten(tile.lse.shape, jnp.float32),
    )
    found, do, _ = jax.lax.fori_loop(0, b, position, carry)
    return found, do
