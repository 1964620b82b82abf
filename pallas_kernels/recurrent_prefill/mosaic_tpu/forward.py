"""A layer's forward loop as one TPU kernel: weights in VMEM, pairs in HBM."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.call import Array, LayerSpec
from pallas_kernels.recurrent_prefill.equations import (
    HIDDEN,
    PreparedWeights,
    Rotary,
    activate_in_kernel,
)
from pallas_kernels.recurrent_prefill.mosaic_tpu.attention import (
    Filled,
    PrefixScratch,
    Segments,
    SoftmaxState,
    read_prefix,
    write_pairs,
)
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    NEAR,
    OWN_ROWS,
    HeadSums,
    Launch,
    block_of_columns,
    block_of_rows,
    dot,
    head_indicator,
    launch_kernel,
    norm_rows,
    resident,
    rotary_tables,
    rotate,
    slopes_row,
)
from pallas_kernels.recurrent_prefill.tiles.layout import Vectors, queries_and_pairs


class LayerInputs(NamedTuple):
    """The kernel's inputs; shapes are those of one position's blocks."""

    q_rows: Array  # [B, T, H E] in HBM, queries by row: a row reads its own prefix
    filled: Filled | None  # the cache before the call, if it has slots
    segments: Any  # `Segments`, or None where each row is one document
    rotary: Any  # `rotary_tables`, each [rows or 1, H E], or None
    q: Array  # [rows, H E], the position's queries
    own_k: Array  # [rows, H E], its temporary keys
    own_v: Array  # [rows, H E], its temporary values
    x: Array  # [rows, D], float32
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
    indicator: Array  # see `head_indicator`


class LayerOutputs(NamedTuple):
    """A layer's outputs; the first three are written a position at a time."""

    z: Any  # [rows, D] of [T, B, D], float32
    attended: Any  # [rows, H E] of [T, B, H E]
    lse: Any  # [rows, H] of [T, B, H], float32
    keys: Any  # [B, S, H E] in HBM, persistent; slots from T on are never written
    values: Any  # [B, S, H E] in HBM


class LayerScratch(NamedTuple):
    """VMEM that lasts from one position to the next."""

    tile_k: Any  # [b, rows, H E], the tile's pairs so far
    tile_v: Any  # [b, rows, H E]
    tile_segments: Any  # [b, rows, 1], their documents, or None
    state: Any  # softmax of the tile's queries over the prefix, [b, rows, ...]
    prefix: Any  # `PrefixScratch`


def run_layer(
    launch: Launch,
    x: Float[Array, "T B D"],
    w: PreparedWeights,
    filled: Filled | None,
    segments: Segments | None,
    rotary: Rotary | None,
    *,
    positions: int,
) -> LayerOutputs:
    """Runs the one layer of `w` over more positions.

    Args:
      x: T full tiles, B full programs.
      filled: what the cache holds; None: nothing, position 0 is the call's first.
      segments: documents, those of positions as [T, B, 1]; None: one per row.
      rotary: [T, B or 1, 1, rope_width / 2], where the layer has RoPE.
      positions: how many of the T are run. What is returned of the others is never
        written, and theirs may be anything.
    """
    spec, tiles = launch.spec, launch.tiles
    T, B, D = x.shape
    b, rows, HE, H = tiles.tile, tiles.rows, spec.heads * spec.head_width, spec.heads
    dtype = jnp.dtype(spec.dtype)
    q, own_k, own_v = (part[0] for part in queries_and_pairs(x[None], w, spec, rotary))
    vectors = Vectors.of(w, spec, D)
    inputs = LayerInputs(
        q_rows=q.swapaxes(0, 1),
        filled=filled,
        segments=segments,
        rotary=rotary_tables(rotary, spec),
        q=q,
        own_k=own_k,
        own_v=own_v,
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
        indicator=head_indicator(spec),
    )
    position = lambda width: pl.BlockSpec((None, rows, width), lambda i, t: (t, i, 0))  # noqa: E731
    for_all = pl.BlockSpec((None, 1, HE), lambda i, t: (t, 0, 0))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    in_smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    of_cache = () if filled is None else (in_hbm, in_hbm, in_smem, in_smem)
    of_segments = () if segments is None else (in_hbm, position(1))
    turns = inputs.rotary or ()
    of_rotary = [for_all if part.shape[1] == 1 else position(HE) for part in turns]
    output = lambda width, dtype: jax.ShapeDtypeStruct((T, B, width), dtype)  # noqa: E731
    slots = -(-T // tiles.keys) * tiles.keys
    pairs = jax.ShapeDtypeStruct((B, slots, HE), dtype)
    lanes = inputs.indicator.shape[1]
    return launch_kernel(
        launch,
        _layer_kernel,
        inputs,
        grid=(B // rows, positions),
        in_specs=[
            in_hbm,
            *of_cache,
            *of_segments,
            *of_rotary,
            *(position(part.shape[-1]) for part in inputs[4:8]),
            *(resident(part) for part in inputs[8:]),
        ],
        out_specs=[*(position(width) for width in (D, HE, H)), in_hbm, in_hbm],
        out_shape=LayerOutputs(
            z=output(D, jnp.float32),
            attended=output(HE, dtype),
            lse=output(H, jnp.float32),
            keys=pairs,
            values=pairs,
        ),
        scratch_shapes=LayerScratch(
            tile_k=pltpu.VMEM((b, rows, HE), dtype),
            tile_v=pltpu.VMEM((b, rows, HE), dtype),
            tile_segments=segments and pltpu.VMEM((b, rows, 1), jnp.int32),
            state=SoftmaxState.scratch(b, rows, numbers=lanes, width=HE),
            prefix=PrefixScratch.of(spec, tiles, lanes, segments=segments is not None),
        ),
        spec=spec,
    )


# A grid step is one position of `rows` rows. On chip throughout: the layer's weights
# (read once), the tile's own pairs and the softmax state of its queries. In HBM: all
# persistent pairs, by row. A tile's first position reads its queries' prefix from
# there, chunk by chunk; its last one writes the tile's pairs there. Besides, x, q and
# temporary pairs cross HBM once, and so do z, attended and normalizers.
def _layer_kernel(
    inputs: LayerInputs, outputs: LayerOutputs, scratch: LayerScratch, *, spec
):
    b, rows, HE = scratch.tile_k.shape
    dtype = scratch.tile_k.dtype
    row, t = pl.program_id(0) * rows, pl.program_id(1)
    u = jax.lax.rem(t, b)

    # A step reads NEAR pairs of the tile at once, also some that no position has
    # written yet: what is there must be finite, since it is weighted with 0.
    @pl.when(t == 0)
    def _():
        scratch.tile_k[:] = jnp.zeros_like(scratch.tile_k)
        scratch.tile_v[:] = jnp.zeros_like(scratch.tile_v)

    # 1. A tile's first position: what all its queries find in the prefix.
    @pl.when(u == 0)
    def _():
        read_prefix(
            inputs.q_rows,
            inputs.filled,
            inputs.segments,
            (outputs.keys, outputs.values),
            scratch.state,
            scratch.prefix,
            row,
            t,
            spec,
        )

    # 2. Position t reads the tile's pairs before it and its own temporary pair, in the
    # slot that its persistent pair takes below.
    scratch.tile_k[u] = inputs.own_k[...]
    scratch.tile_v[u] = inputs.own_v[...]
    if inputs.segments is not None:
        scratch.tile_segments[u] = inputs.segments.position[...]
    few = block_of_rows(rows, OWN_ROWS)

    def own_tile(i, _):
        _read_tile(inputs, outputs, scratch, pl.ds(i * few, few), u, spec)

    jax.lax.fori_loop(0, rows // few, own_tile, None)

    # 3. Both branches, each added to the residual stream.
    y = dot(outputs.attended[...], inputs.w_out[...]) + inputs.b_out[...]
    y = inputs.x[...] + spec.residual_scale * y
    n = norm_rows(y, inputs.mlp_scale, inputs.mlp_shift, spec.norm, spec.norm_eps)
    z = y + spec.residual_scale * _mlp(n.astype(dtype), inputs, spec)
    outputs.z[:] = z

    # 4. The persistent pair. Later positions read it rounded to the pairs' dtype, as
    # they would from the cache.
    n = z
    if spec.normed_persistent:
        n = norm_rows(
            z,
            inputs.attention_scale,
            inputs.attention_shift,
            spec.norm,
            spec.norm_eps,
        )
    pair = dot(n.astype(dtype), inputs.w_kv[...]) + inputs.b_kv[...]
    k = norm_rows(
        pair[:, :HE], inputs.k_scale, inputs.k_shift, spec.qk_norm, spec.qk_norm_eps
    )
    if inputs.rotary is not None:
        cos, sin = inputs.rotary
        k = rotate(k, cos[...], sin[...], spec)
    scratch.tile_k[u] = k.astype(dtype)
    scratch.tile_v[u] = pair[:, HE:].astype(dtype)

    # 5. A tile's last position, or the call's: its pairs join the prefix.
    @pl.when((u == b - 1) | (t == pl.num_programs(1) - 1))
    def _():
        tile_pairs = scratch.tile_k, scratch.tile_v
        pairs = outputs.keys, outputs.values
        write_pairs(tile_pairs, pairs, scratch.prefix, row, t - u)


def _mlp(n: Float[Array, "rows D"], inputs: LayerInputs, spec: LayerSpec) -> Array:
    """Applies the MLP, a block of its inner columns at a time.

    All of them at once are more than the registers hold many times over: what one
    block's activation waits for, another block's products do.
    """
    F = inputs.w_down.shape[0]
    gated = inputs.w_in.shape[1] != F
    width = block_of_columns(F)
    z = inputs.b_down[...]
    for first in range(0, F, width):
        columns = pl.ds(first, width)
        hidden = dot(n, inputs.w_in[:, columns]) + inputs.b_in[:, columns]
        if gated:
            columns = pl.ds(F + first, width)
            gate = dot(n, inputs.w_in[:, columns]) + inputs.b_in[:, columns]
            hidden = activate_in_kernel(gate, spec.activation) * hidden
        else:
            hidden = activate_in_kernel(hidden, spec.activation)
        z = z + dot(hidden.astype(n.dtype), inputs.w_down[pl.ds(first, width), :])
    return z


def _read_tile(inputs, outputs, scratch: LayerScratch, block, u, spec: LayerSpec):
    """Merges the tile's pairs up to u into the state of query u: a block of rows.

    A block is as many rows as have their state in registers.
    """
    few, H = block.size, spec.heads
    heads = HeadSums(inputs.indicator, spec)
    slopes = slopes_row(spec, inputs.indicator.shape[1])
    q = inputs.q[block].astype(jnp.float32)

    def attend_chunk(c, running):
        largest, normalizer, weighted = running
        part = pl.ds(c * NEAR, NEAR)
        k, v = (tile[part, block] for tile in (scratch.tile_k, scratch.tile_v))
        shape = (NEAR, few, slopes.shape[1])
        at = c * NEAR + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        logits = spec.logit_scale * heads.sums(q[None] * k.astype(jnp.float32))
        logits = logits - slopes[None] * (u - at).astype(jnp.float32)
        seen = at <= u
        if inputs.segments is not None:
            mine = inputs.segments.position[block]
            seen = seen & (scratch.tile_segments[part, block] == mine[None])
        logits = jnp.where(seen, logits, HIDDEN)
        above = jnp.maximum(largest, jnp.max(logits, axis=0))
        shrink = jnp.exp(largest - above)
        # Next to a visible pair others weigh exactly 0; the last chunk has the
        # position's own.
        p = jnp.exp(logits - above[None])
        *p_wide, shrink_wide = heads.repeat(jnp.concatenate([p, shrink[None]]))
        for i, weights in enumerate(p_wide):
            read = weights * v[i].astype(jnp.float32)
            weighted = (weighted * shrink_wide if i == 0 else weighted) + read
        return above, normalizer * shrink + jnp.sum(p, axis=0), weighted

    start = tuple(ref[u, block] for ref in scratch.state)
    above, normalizer, weighted = jax.lax.fori_loop(
        0, u // NEAR + 1, attend_chunk, start
    )
    attended = weighted * heads.repeat(1.0 / normalizer)
    outputs.attended[block] = attended.astype(outputs.attended.dtype)
    outputs.lse[block] = (above + jnp.log(normalizer))[:, :H]
