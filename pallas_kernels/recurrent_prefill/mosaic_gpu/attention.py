"""A position's attention to its tile's earlier ones, 64 rows of a head at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.recurrent_prefill.mosaic_gpu.blocks import (
    BY_COLUMN,
    BY_ROW,
    laid_out,
    over_columns,
    over_rows,
    put,
    read,
)
from pallas_kernels.recurrent_prefill.mosaic_gpu.launch import SIDE, Launch
from pallas_kernels.recurrent_prefill.mosaic_gpu.products import root_mean_square
from pallas_kernels.recurrent_prefill.mosaic_gpu.refs import Refs


def attend(launch: Launch, refs: Refs, t, program) -> None:
    """Writes what position t attends to, for a program's blocks of rows and heads."""
    heads = launch.spec.heads
    units = refs.outputs.y.shape[0] // SIDE * heads

    @pl.loop(0, -(-units // launch.programs))
    def _(n):
        unit = n * launch.programs + program

        @pl.when(unit < units)
        def _():
            rows = pl.ds(unit // heads * SIDE, SIDE)
            pl.when(t > 0)(lambda: _finish_key(launch, refs, t, rows, unit % heads))
            _attend(launch, refs, t, rows, unit % heads)


def _finish_key(launch: Launch, refs: Refs, t, rows, head) -> None:
    """Normalises the key of position t - 1, whose squares are complete only now."""
    spec, outputs, layer = launch.spec, refs.outputs, refs.layer
    columns = pl.ds(head * SIDE, SIDE)
    k = read(launch, outputs.raw_k, rows, columns)
    if spec.qk_norm == "rms":
        # The first programs finish the keys, the others the values.
        owners = spec.heads * SIDE // launch.shares.pair.columns
        factor = root_mean_square(
            launch,
            *(outputs.k_squares, 0, owners, rows),
            *(spec.heads * SIDE, spec.qk_norm_eps),
        )
        k = k * over_columns(factor, SIDE)
    scale, shift = (
        over_rows(read(launch, vector, columns, layout=BY_COLUMN))
        for vector in (layer.k_scale, layer.k_shift)
    )
    k = k * scale + shift
    put(k, refs.scratch.head, outputs.keys.at[t - 1, rows, columns])


def _attend(launch: Launch, refs: Refs, t, rows, head) -> None:
    """Merges the tile's earlier pairs into the softmax of one head's queries."""
    inputs, outputs, scratch = refs.inputs, refs.outputs, refs.scratch
    columns = pl.ds(head * SIDE, SIDE)
    q = read(launch, inputs.q, t, rows, columns).astype(jnp.float32)
    q = q * launch.spec.logit_scale
    slope = refs.layer.slopes[head]

    def fetch(j) -> None:
        # Two pairs share the ring's blocks: key and value of one are on their way while
        # the other's are read.
        for n, pairs in enumerate((outputs.keys, outputs.values)):
            slot = j % 2 * 2 + n
            plgpu.copy_gmem_to_smem(
                pairs.at[j, rows, columns],
                scratch.ring.at[slot],
                scratch.arrived.at[slot],
            )

    def arrived(slot) -> Any:
        plgpu.barrier_wait(scratch.arrived.at[slot])
        return laid_out(launch, scratch.ring[slot]).astype(jnp.float32)

    def pair(j, running):
        largest, normalizer, weighted = running
        pl.when(j + 1 < t)(lambda: fetch(j + 1))
        k = arrived(j % 2 * 2)
        logit = jnp.sum(q * k, axis=1) - slope * (t - j).astype(jnp.float32)
        above = jnp.maximum(largest, logit)
        shrink, p = jnp.exp(largest - above), jnp.exp(logit - above)
        seen = over_columns(p, SIDE) * arrived(j % 2 * 2 + 1)
        weighted = weighted * over_columns(shrink, SIDE) + seen
        return above, normalizer * shrink + p, weighted

    pl.when(t > 0)(lambda: fetch(jnp.int32(0)))
    running = (
        read(launch, inputs.largest, t, head, rows, layout=BY_ROW),
        read(launch, inputs.normalizer, t, head, rows, layout=BY_ROW),
        read(launch, inputs.weighted, t, rows, columns),
    )
    above, normalizer, weighted = jax.lax.fori_loop(0, t, pair, running)
    outputs.lse[t, head, rows] = above + jnp.log(normalizer)
    attended = weighted / over_columns(normalizer, SIDE)
    put(attended, scratch.head, outputs.attended.at[t, rows, columns])
