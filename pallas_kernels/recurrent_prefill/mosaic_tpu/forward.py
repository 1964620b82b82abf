"""A whole layer's forward loop as one TPU kernel, its weights resident in VMEM."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import Array
from pallas_kernels.recurrent_prefill.equations import (
    HIDDEN,
    Prepared,
    activate_in_kernel,
)
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    NEAR,
    Launch,
    dot,
    head_groups,
    head_indicator,
    launch_kernel,
    norm_rows,
    resident,
    slopes_row,
)
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors, queries_and_pairs


class LayerInputs(NamedTuple):
    """What the kernel reads; the shapes are those of one grid step's blocks."""

    q_rows: Array  # [rows, b, H E], queries by row: a row attends to its own prefix
    own_k: Array  # [rows, b, H E], temporary keys
    own_v: Array  # [rows, b, H E], temporary values
    q: Array  # [b, rows, H E], the same queries by position, for the loop
    x: Array  # [b, rows, D], float32
    w_out: Array  # [H E, D]
    w_in: Array  # [D, F], with a gate [D, 2 F]: up, then gate
    w_down: Array  # [F, D]
    w_kv: Array  # [D, 2 H E]: keys, then values
    b_out: Array  # [1, D]
    b_in: Array  # [1, F or 2 F]
    b_down: Array  # [1, D]
    b_kv: Array  # [1, 2 H E]
    attention_scale: Array  # [1, D], of the norm in front of W_k and W_v
    attention_shift: Array  # [1, D]
    mlp_scale: Array  # [1, D]
    mlp_shift: Array  # [1, D]
    k_scale: Array  # [1, H E], of the k-norm
    k_shift: Array  # [1, H E]


class LayerOutputs(NamedTuple):
    """What a layer computed, positions first; a block is [b, rows, ...]."""

    z: Any  # [T, B, D], float32
    attended: Any  # [T, B, H E]
    lse: Any  # [T, B, H], float32
    keys: Any  # [T, B, H E], persistent
    values: Any  # [T, B, H E]


class LayerScratch(NamedTuple):
    """VMEM that lasts from one tile of the sequence to the next."""

    keys: Any  # [rows, T, H E], all persistent pairs so far
    values: Any  # [rows, T, H E]
    tile_k: Any  # [b, rows, H E], this tile's, float32
    tile_v: Any  # [b, rows, H E]
    largest: Any  # [b, rows, H], softmax state of the queries by position
    normalizer: Any  # [b, rows, H]
    weighted: Any  # [b, rows, H E]
    largest_rows: Any  # [rows, b, H], the same by row
    normalizer_rows: Any  # [rows, b, H]
    weighted_rows: Any  # [rows, b, H E]


def run_layer(launch: Launch, x: Float[Array, "T B D"], w: Prepared) -> LayerOutputs:
    """Runs the one layer of `w` from position 0; T whole tiles, B whole programs."""
    spec, tiles = launch.spec, launch.tiles
    T, B, D = x.shape
    b, rows, HE, H = tiles.tile, tiles.rows, spec.heads * spec.head_width, spec.heads
    q, own_k, own_v = (part[0] for part in queries_and_pairs(x[None], w, spec))
    vectors = Vectors.of(w, spec, D)
    q_rows, own_k, own_v = (part.swapaxes(0, 1) for part in (q, own_k, own_v))
    inputs = LayerInputs(
        q_rows=q_rows,
        own_k=own_k,
        own_v=own_v,
        q=q,
        x=x,
        w_out=w.w_out[0],
        w_in=w.w_in[0],
        w_down=w.w_down[0],
        w_kv=w.w_kv[0],
        b_out=vectors.b_out,
        b_in=vectors.b_in,
        b_down=vectors.b_down,
        b_kv=vectors.b_kv,
        attention_scale=vectors.attention_norm[0],
        attention_shift=vectors.attention_norm[1],
        mlp_scale=vectors.mlp_norm[0],
        mlp_shift=vectors.mlp_norm[1],
        k_scale=vectors.k_norm[0],
        k_shift=vectors.k_norm[1],
    )
    by_position = lambda width: pl.BlockSpec((b, rows, width), lambda i, j: (j, i, 0))  # noqa: E731
    by_row = pl.BlockSpec((rows, b, HE), lambda i, j: (i, j, 0))
    whole = lambda width, dtype: jax.ShapeDtypeStruct((T, B, width), dtype)  # noqa: E731
    prefix = pltpu.VMEM((rows, T, HE), jnp.dtype(spec.dtype))
    own = lambda width: pltpu.VMEM((b, rows, width), jnp.float32)  # noqa: E731
    own_by_row = lambda width: pltpu.VMEM((rows, b, width), jnp.float32)  # noqa: E731
    return launch_kernel(
        launch,
        _layer_kernel,
        inputs,
        grid=(B // rows, T // b),
        in_specs=[
            *(by_row, by_row, by_row),
            *(by_position(HE), by_position(D)),
            *(resident(part) for part in inputs[5:]),
        ],
        out_specs=[by_position(width) for width in (D, HE, H, HE, HE)],
        out_shape=LayerOutputs(
            z=whole(D, jnp.float32),
            attended=whole(HE, spec.dtype),
            lse=whole(H, jnp.float32),
            keys=whole(HE, spec.dtype),
            values=whole(HE, spec.dtype),
        ),
        scratch_shapes=LayerScratch(
            *(prefix, prefix),
            *(own(HE), own(HE), own(H), own(H), own(HE)),
            *(own_by_row(H), own_by_row(H), own_by_row(HE)),
        ),
        spec=spec,
        chunk=tiles.keys,
    )


# A program owns `rows` rows and runs their whole sequence, b positions a grid step.
# On chip throughout: the layer's weights (read once), the rows' persistent pairs, the
# tile's own pairs in float32 and the softmax state of its queries. What crosses HBM:
# x, q and temporary pairs in, z, attended, normalizers and pairs out, each once.
def _layer_kernel(
    inputs: LayerInputs, outputs: LayerOutputs, scratch: LayerScratch, *, spec, chunk
):
    b, rows, HE = scratch.tile_k.shape
    H, F = spec.heads, inputs.w_down.shape[0]
    before = pl.program_id(1) * b
    indicator = head_indicator(spec)
    slopes = slopes_row(spec)
    dtype = inputs.w_out.dtype

    def by_head(products):
        """Sums [..., rows, H E] over each head, [..., rows, H]."""
        flat = products.reshape(-1, HE)
        return dot(flat, indicator).reshape(*products.shape[:-1], H)

    def over_heads(p):
        """Repeats [..., rows, H] over each head's width."""
        return dot(p.reshape(-1, H), indicator.T).reshape(*p.shape[:-1], HE)

    wide = lambda ref: ref[...].astype(jnp.float32)  # noqa: E731

    # 1. Each query's softmax starts with its own temporary pair, the largest logit so
    # far. The tile's pairs are cleared: a step reads NEAR of them at once, also some
    # that no position has written yet.
    scratch.tile_k[:] = jnp.zeros_like(scratch.tile_k)
    scratch.tile_v[:] = jnp.zeros_like(scratch.tile_v)
    by_rows = (scratch.largest_rows, scratch.normalizer_rows, scratch.weighted_rows)
    scratch.largest_rows[:] = spec.logit_scale * by_head(
        wide(inputs.q_rows) * wide(inputs.own_k)
    )
    scratch.normalizer_rows[:] = jnp.ones_like(scratch.normalizer_rows)
    scratch.weighted_rows[:] = wide(inputs.own_v)

    # 2. The prefix, a row at a time: b queries of a head are one product on the matrix
    # unit. The loop below reads the state by position, so it is transposed.
    def row(r, _):
        pairs = (scratch.keys, scratch.values)
        attend_prefix(r, before, inputs.q_rows, pairs, by_rows, spec, chunk)

    jax.lax.fori_loop(0, rows, row, None)
    by_time = (scratch.largest, scratch.normalizer, scratch.weighted)
    for ref, rows_ref in zip(by_time, by_rows, strict=True):
        ref[:] = jnp.swapaxes(rows_ref[...], 0, 1)

    # 3. The recurrence: position t needs the pairs of all positions before it.
    def position(t, _):
        q = inputs.q[t].astype(jnp.float32) * spec.logit_scale

        def attend_chunk(c, running):
            largest, normalizer, weighted = running
            part = pl.ds(c * NEAR, NEAR)
            # Earlier positions of the tile. All heads lie side by side in the lanes: a
            # product with a 0/1 matrix sums each head's own.
            at = c * NEAR + jax.lax.broadcasted_iota(jnp.int32, (NEAR, rows, H), 0)
            logits = by_head(q[None] * scratch.tile_k[part])
            logits = logits - slopes[None] * (t - at).astype(jnp.float32)
            logits = jnp.where(at < t, logits, HIDDEN)
            above = jnp.maximum(largest, jnp.max(logits, axis=0))
            shrink = jnp.exp(largest - above)
            p = jnp.where(at < t, jnp.exp(logits - above[None]), 0.0)
            read = jnp.sum(over_heads(p) * scratch.tile_v[part], axis=0)
            normalizer = normalizer * shrink + jnp.sum(p, axis=0)
            return above, normalizer, weighted * over_heads(shrink) + read

        start = (scratch.largest[t], scratch.normalizer[t], scratch.weighted[t])
        above, normalizer, weighted = jax.lax.fori_loop(
            0, (t + NEAR - 1) // NEAR, attend_chunk, start
        )
        attended = (weighted * over_heads(1.0 / normalizer)).astype(dtype)
        outputs.attended[t] = attended
        outputs.lse[t] = above + jnp.log(normalizer)

        # Both branches, each added to the residual stream.
        y = dot(attended, inputs.w_out[...]) + inputs.b_out[...]
        y = inputs.x[t] + spec.residual_scale * y
        n = norm_rows(y, inputs.mlp_scale, inputs.mlp_shift, spec.norm, spec.norm_eps)
        hidden = dot(n.astype(dtype), inputs.w_in[...]) + inputs.b_in[...]
        if hidden.shape[1] == F:
            hidden = activate_in_kernel(hidden, spec.activation)
        else:
            hidden = activate_in_kernel(hidden[:, F:], spec.activation) * hidden[:, :F]
        z = dot(hidden.astype(dtype), inputs.w_down[...]) + inputs.b_down[...]
        z = y + spec.residual_scale * z
        outputs.z[t] = z
        # The persistent pair. Later positions read it rounded to the pairs' dtype, as
        # they would from the cache.
        n = z
        if spec.normed_persistent:
            n = norm_rows(
                *(z, inputs.attention_scale, inputs.attention_shift),
                *(spec.norm, spec.norm_eps),
            )
        pair = dot(n.astype(dtype), inputs.w_kv[...]) + inputs.b_kv[...]
        k = norm_rows(
            pair[:, :HE], inputs.k_scale, inputs.k_shift, spec.qk_norm, spec.qk_norm_eps
        )
        outputs.keys[t], outputs.values[t] = k.astype(dtype), pair[:, HE:].astype(dtype)
        scratch.tile_k[t] = outputs.keys[t].astype(jnp.float32)
        scratch.tile_v[t] = outputs.values[t].astype(jnp.float32)

    jax.lax.fori_loop(0, b, position, None)

    # 4. The tile's pairs join the prefix.
    slots = pl.ds(pl.multiple_of(before, b), b)
    scratch.keys[:, slots, :] = jnp.swapaxes(scratch.tile_k[...], 0, 1).astype(dtype)
    scratch.values[:, slots, :] = jnp.swapaxes(scratch.tile_v[...], 0, 1).astype(dtype)


def attend_prefix(r, before, q_rows_ref, pairs, state, spec, chunk):
    """Merges row r's prefix into the state of its b queries, a few heads at a time.

    Heads narrower than a register's 128 lanes go together: a query with the other
    heads' lanes cleared is multiplied by all lanes of the keys.

    Args:
      before: positions of the prefix.
      q_rows_ref: [rows, b, H E].
      pairs: refs of the persistent keys and values, [rows, T, H E].
      state: refs of largest and normalizer [rows, b, H], weighted [rows, b, H E].
    """
    keys_ref, values_ref = pairs
    largest_ref, normalizer_ref, weighted_ref = state
    b, H, E = q_rows_ref.shape[1], spec.heads, spec.head_width
    largest, normalizer = largest_ref[r], normalizer_ref[r]
    lane = jax.lax.broadcasted_iota(jnp.int32, (b, H), 1)
    for group in head_groups(spec):
        lanes = pl.ds(group.first * E, group.width)
        owner = jax.lax.broadcasted_iota(jnp.int32, (b, group.width), 1) // E
        q = q_rows_ref[r, :, lanes]
        queries = [
            jnp.where(owner == h, q, jnp.zeros_like(q)) for h in range(group.heads)
        ]

        def attend_chunk(
            c, running, lanes=lanes, owner=owner, queries=queries, group=group
        ):
            slots = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
            k, v = keys_ref[r, slots, lanes], values_ref[r, slots, lanes]
            at = c * chunk + jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 1)
            t = jax.lax.broadcasted_iota(jnp.int32, (b, chunk), 0)
            seen = at < before
            # Slots beyond the prefix were never written and may hold NaN, which a
            # probability of 0 would not stop.
            v = jnp.where(
                c * chunk + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < before,
                v,
                jnp.zeros_like(v),
            )
            new = []
            for h, (largest, normalizer, weighted) in enumerate(running):
                logits = spec.logit_scale * dot(queries[h], k, transposed=True)
                if spec.alibi_max_bias is not None:
                    slope = 2.0 ** (
                        -spec.alibi_max_bias * (group.first + h + 1) / spec.heads
                    )
                    logits = logits - slope * (before + t - at).astype(jnp.float32)
                logits = jnp.where(seen, logits, HIDDEN)
                above = jnp.maximum(largest, jnp.max(logits, axis=1, keepdims=True))
                shrink = jnp.exp(largest - above)
                p = jnp.where(seen, jnp.exp(logits - above), 0.0)
                new.append(
                    (
                        above,
                        normalizer * shrink + jnp.sum(p, axis=1, keepdims=True),
                        weighted * shrink + dot(p.astype(v.dtype), v),
                    )
                )
            return tuple(new)

        # Every head carries the whole group's lanes; its own are taken out at the end.
        own = weighted_ref[r, :, lanes]
        start = tuple(
            (
                largest[:, group.first + h : group.first + h + 1],
                normalizer[:, group.first + h : group.first + h + 1],
                own,
            )
            for h in range(group.heads)
        )
        chunks = (before + chunk - 1) // chunk
        weighted = own
        for h, (high, total, o) in enumerate(
            jax.lax.fori_loop(0, chunks, attend_chunk, start)
        ):
            mine = lane == group.first + h
            largest = jnp.where(mine, high, largest)
            normalizer = jnp.where(mine, total, normalizer)
            weighted = jnp.where(owner == h, o, weighted)
        weighted_ref[r, :, lanes] = weighted
    largest_ref[r], normalizer_ref[r] = largest, normalizer
