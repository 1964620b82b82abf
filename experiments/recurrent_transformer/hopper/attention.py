"""A position's attention to its tile's earlier ones, 64 rows of a head at once.

The same worker has a block's head at every position: it alone writes its keys, and
reads them with plain reads as it wrote them.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from experiments.recurrent_transformer.hopper.blocks import (
    BY_COLUMN,
    BY_ROW,
    over_columns,
    over_rows,
    read,
)
from experiments.recurrent_transformer.hopper.launch import SIDE, Launch
from experiments.recurrent_transformer.hopper.products import (
    KEY_SQUARES,
    row_factors,
)
from experiments.recurrent_transformer.hopper.refs import Refs


def attend(launch: Launch, refs: Refs, t, block, head) -> None:
    """Writes what position t attends to, for a block of rows and a head."""
    rows = pl.ds(block * SIDE, SIDE)
    pl.when(t > 0)(lambda: _finish_key(launch, refs, t, rows, head))
    _attend(launch, refs, t, rows, head)


def _finish_key(launch: Launch, refs: Refs, t, rows, head) -> None:
    """Normalises the key of position t - 1, whose squares are complete only now."""
    spec, outputs, layer = launch.spec, refs.outputs, refs.layer
    columns = pl.ds(head * SIDE, SIDE)
    k = read(launch, outputs.raw_k, rows, columns)
    if spec.qk_norm == "rms":
        factor = row_factors(launch, refs, KEY_SQUARES, rows, spec.qk_norm_eps)
        k = k * over_columns(factor, SIDE)
    scale, shift = (
        over_rows(read(launch, vector, columns, layout=BY_COLUMN))
        for vector in (layer.k_scale, layer.k_shift)
    )
    outputs.keys[t - 1, rows, columns] = (k * scale + shift).astype(outputs.keys.dtype)


def _attend(launch: Launch, refs: Refs, t, rows, head) -> None:
    """Merges the tile's earlier pairs into the softmax of one head's queries."""
    inputs, outputs = refs.inputs, refs.outputs
    columns = pl.ds(head * SIDE, SIDE)
    q = read(launch, inputs.q, t, rows, columns).astype(jnp.float32)
    q = q * launch.spec.logit_scale
    slope = refs.layer.slopes[head]

    def pair(j, running):
        largest, normalizer, weighted = running
        k, v = (
            read(launch, pairs, j, rows, columns).astype(jnp.float32)
            for pairs in (outputs.keys, outputs.values)
        )
        logit = jnp.sum(q * k, axis=1) - slope * (t - j).astype(jnp.float32)
        above = jnp.maximum(largest, logit)
        shrink, p = jnp.exp(largest - above), jnp.exp(logit - above)
        weighted = weighted * over_columns(shrink, SIDE) + over_columns(p, SIDE) * v
        return above, normalizer * shrink + p, weighted

    running = (
        read(launch, inputs.largest, t, head, rows, layout=BY_ROW),
        read(launch, inputs.normalizer, t, head, rows, layout=BY_ROW),
        read(launch, inputs.weighted, t, rows, columns),
    )
    above, normalizer, weighted = jax.lax.fori_loop(0, t, pair, running)
    outputs.lse[t, head, rows] = above + jnp.log(normalizer)
    attended = weighted / over_columns(normalizer, SIDE)
    outputs.attended[t, rows, columns] = attended.astype(outputs.attended.dtype)
