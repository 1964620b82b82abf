"""A whole layer's forward loop as one TPU kernel, its weights resident in VMEM."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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


class MosaicOutputs(NamedTuple):
    """What a layer computed, positions first.

    Attributes:
      z: [T, B, D].
      attended: [T, B, H E].
      lse: [T, B, H].
      keys, values: the persistent pairs, [T, B, H E].
    """

    z: Array
    attended: Array
    lse: Array
    keys: Array
    values: Array


def run_layer(launch: Launch, x: Array, w: Prepared) -> MosaicOutputs:
    """Runs x [T, B, D] through the one layer of `w`, from position 0."""
    spec, tiles = launch.spec, launch.tiles
    T, B, D = x.shape
    b, block_b, HE, H = tiles.tile, tiles.rows, spec.heads * spec.head_width, spec.heads
    q, own_k, own_v = (part[0] for part in queries_and_pairs(x[None], w, spec))
    vectors = Vectors.of(w, spec, D)
    at_tile = lambda width: pl.BlockSpec((b, block_b, width), lambda i, j: (j, i, 0))  # noqa: E731
    by_row = pl.BlockSpec((block_b, b, HE), lambda i, j: (i, j, 0))
    weights = [w.w_out, w.w_in, w.w_down, w.w_kv]
    biases = [vectors.b_out, vectors.b_in, vectors.b_down, vectors.b_kv]
    norms = [*vectors.attention_norm, *vectors.mlp_norm, *vectors.k_norm]
    rows = lambda width, dtype: jax.ShapeDtypeStruct((T, B, width), dtype)  # noqa: E731
    whole = lambda dtype: pltpu.VMEM((block_b, T, HE), dtype)  # noqa: E731
    own = lambda width: pltpu.VMEM((b, block_b, width), jnp.float32)  # noqa: E731
    by_rows = lambda width: pltpu.VMEM((block_b, b, width), jnp.float32)  # noqa: E731
    out = launch_kernel(
        launch,
        _layer_kernel,
        *(part.swapaxes(0, 1) for part in (q, own_k, own_v)),
        *(q, x),
        *(part[0] for part in weights),
        *biases,
        *norms,
        grid=(B // block_b, T // b),
        in_specs=[
            *(by_row, by_row, by_row),
            *(at_tile(HE), at_tile(D)),
            *(resident(part[0]) for part in weights),
            *(resident(part) for part in (*biases, *norms)),
        ],
        out_specs=[at_tile(D), at_tile(HE), at_tile(H), at_tile(HE), at_tile(HE)],
        out_shape=[
            rows(D, jnp.float32),
            rows(HE, spec.dtype),
            rows(H, jnp.float32),
            rows(HE, spec.dtype),
            rows(HE, spec.dtype),
        ],
        scratch_shapes=[
            *(whole(spec.dtype), whole(spec.dtype)),
            *(own(HE), own(HE), own(H), own(H), own(HE)),
            *(by_rows(H), by_rows(H), by_rows(HE)),
        ],
        spec=spec,
        chunk=tiles.keys,
    )
    return MosaicOutputs(*out)


# A program owns block_b rows and runs their whole sequence, b positions a grid step.
# On chip throughout: the layer's weights (read once), the rows' persistent pairs, the
# tile's own pairs in float32 and the softmax state of its queries. What crosses HBM:
# x, q and temporary pairs in, z, attended, normalizers and pairs out, each once.
def _layer_kernel(
    q_rows_ref,
    own_k_ref,
    own_v_ref,
    q_ref,
    x_ref,
    w_out_ref,
    w_in_ref,
    w_down_ref,
    w_kv_ref,
    b_out_ref,
    b_in_ref,
    b_down_ref,
    b_kv_ref,
    attention_scale_ref,
    attention_shift_ref,
    mlp_scale_ref,
    mlp_shift_ref,
    k_scale_ref,
    k_shift_ref,
    z_ref,
    attended_ref,
    lse_ref,
    new_k_ref,
    new_v_ref,
    keys_ref,
    values_ref,
    tile_k_ref,
    tile_v_ref,
    largest_ref,
    normalizer_ref,
    weighted_ref,
    largest_rows_ref,
    normalizer_rows_ref,
    weighted_rows_ref,
    *,
    spec,
    chunk,
):
    b, block_b, HE = tile_k_ref.shape
    H, F = spec.heads, w_down_ref.shape[0]
    before = pl.program_id(1) * b
    indicator = head_indicator(spec)
    slopes = slopes_row(spec)
    dtype = w_out_ref.dtype

    def by_head(products):
        """Sums [..., block_b, H E] over each head, [..., block_b, H]."""
        flat = products.reshape(-1, HE)
        return dot(flat, indicator).reshape(*products.shape[:-1], H)

    def over_heads(p):
        """Repeats [..., block_b, H] over each head's width."""
        return dot(p.reshape(-1, H), indicator.T).reshape(*p.shape[:-1], HE)

    wide = lambda ref: ref[...].astype(jnp.float32)  # noqa: E731
    tile_k_ref[:] = jnp.zeros_like(tile_k_ref)
    tile_v_ref[:] = jnp.zeros_like(tile_v_ref)
    by_rows = (largest_rows_ref, normalizer_rows_ref, weighted_rows_ref)
    largest_rows_ref[:] = spec.logit_scale * by_head(wide(q_rows_ref) * wide(own_k_ref))
    normalizer_rows_ref[:] = jnp.ones_like(normalizer_rows_ref)
    weighted_rows_ref[:] = wide(own_v_ref)

    def row(r, _):
        attend_prefix(
            r,
            before,
            q_rows_ref,
            keys_ref,
            values_ref,
            by_rows,
            spec,
            chunk,
        )

    jax.lax.fori_loop(0, block_b, row, None)
    by_time = (largest_ref, normalizer_ref, weighted_ref)
    for ref, rows_ref in zip(by_time, by_rows, strict=True):
        ref[:] = jnp.swapaxes(rows_ref[...], 0, 1)

    def position(t, _):
        q = q_ref[t].astype(jnp.float32) * spec.logit_scale

        def attend_chunk(c, running):
            largest, normalizer, weighted = running
            part = pl.ds(c * NEAR, NEAR)
            at = c * NEAR + jax.lax.broadcasted_iota(jnp.int32, (NEAR, block_b, H), 0)
            logits = by_head(q[None] * tile_k_ref[part])
            logits = logits - slopes[None] * (t - at).astype(jnp.float32)
            logits = jnp.where(at < t, logits, HIDDEN)
            above = jnp.maximum(largest, jnp.max(logits, axis=0))
            shrink = jnp.exp(largest - above)
            p = jnp.where(at < t, jnp.exp(logits - above[None]), 0.0)
            met = jnp.sum(over_heads(p) * tile_v_ref[part], axis=0)
            normalizer = normalizer * shrink + jnp.sum(p, axis=0)
            return above, normalizer, weighted * over_heads(shrink) + met

        start = (largest_ref[t], normalizer_ref[t], weighted_ref[t])
        above, normalizer, weighted = jax.lax.fori_loop(
            0, (t + NEAR - 1) // NEAR, attend_chunk, start
        )
        attended = (weighted * over_heads(1.0 / normalizer)).astype(dtype)
        attended_ref[t] = attended
        lse_ref[t] = above + jnp.log(normalizer)

        y = dot(attended, w_out_ref[...]) + b_out_ref[...]
        y = x_ref[t] + spec.residual_scale * y
        n = norm_rows(y, mlp_scale_ref, mlp_shift_ref, spec.norm, spec.norm_eps)
        hidden = dot(n.astype(dtype), w_in_ref[...]) + b_in_ref[...]
        if hidden.shape[1] == F:
            hidden = activate_in_kernel(hidden, spec.activation)
        else:
            hidden = activate_in_kernel(hidden[:, F:], spec.activation) * hidden[:, :F]
        z = dot(hidden.astype(dtype), w_down_ref[...]) + b_down_ref[...]
        z = y + spec.residual_scale * z
        z_ref[t] = z
        n = z
        if spec.normed_persistent:
            n = norm_rows(
                *(z, attention_scale_ref, attention_shift_ref),
                *(spec.norm, spec.norm_eps),
            )
        pair = dot(n.astype(dtype), w_kv_ref[...]) + b_kv_ref[...]
        k = norm_rows(
            pair[:, :HE], k_scale_ref, k_shift_ref, spec.qk_norm, spec.qk_norm_eps
        )
        new_k_ref[t], new_v_ref[t] = k.astype(dtype), pair[:, HE:].astype(dtype)
        tile_k_ref[t] = new_k_ref[t].astype(jnp.float32)
        tile_v_ref[t] = new_v_ref[t].astype(jnp.float32)

    jax.lax.fori_loop(0, b, position, None)

    slots = pl.ds(pl.multiple_of(before, b), b)
    keys_ref[:, slots, :] = jnp.swapaxes(tile_k_ref[...], 0, 1).astype(dtype)
    values_ref[:, slots, :] = jnp.swapaxes(tile_v_ref[...], 0, 1).astype(dtype)


def attend_prefix(r, before, q_rows_ref, keys_ref, values_ref, state, spec, chunk):
    """Merges row r's prefix into the state of its b queries, a few heads at a time.

    Heads narrower than a register's 128 lanes go together: a query, the other heads'
    lanes cleared against all lanes of the keys.
    """
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
            # What lies beyond the prefix was never written.
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
