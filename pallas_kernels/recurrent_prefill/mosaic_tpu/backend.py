"""TPU path: one kernel runs a whole layer's loop with its weights in VMEM."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    Residuals,
    Rows,
)
from pallas_kernels.recurrent_prefill.block_sizes import BlockSizes, choose
from pallas_kernels.recurrent_prefill.equations import prepare
from pallas_kernels.recurrent_prefill.mesh_layout import ONE_STAGE, Stages
from pallas_kernels.recurrent_prefill.mosaic_tpu.backward import mosaic_kernels
from pallas_kernels.recurrent_prefill.mosaic_tpu.forward import run_layer
from pallas_kernels.recurrent_prefill.mosaic_tpu.launch import (
    Launch,
    LayerSizes,
    backward_bytes,
    choose_tiles,
    forward_bytes,
    refusal_of_sizes,
)
from pallas_kernels.recurrent_prefill.tiles.backward import Inputs, run_backward
from pallas_kernels.recurrent_prefill.tiles.refusal import refusal_of_call
from pallas_kernels.target import refusal_of_mosaic_tpu, vmem_bytes


def supported(*arrays: Any, stages: Stages = ONE_STAGE, **options: Any) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    if stages.count > 1:
        return "runs no layers on several stages"
    return refusal_of_mosaic_tpu() or expressible(*arrays, **options)


def expressible(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None = None,
) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    reason = refusal_of_call(x, rows, spec)
    if reason is not None:
        return reason
    if cache.slots:
        return "starts at position 0 without a cache to fill"
    if schedule not in (None, "prefix"):
        return f'runs tiles of one layer: schedule "prefix", got {schedule!r}'
    options = {"spec": spec, "schedule": schedule, "tile": tile, "blocks": blocks}
    tile, blocks = choose("mosaic_tpu", x, weights, cache, **options)
    sizes = LayerSizes.of(x, weights, spec)
    reason = blocks.refusal_beyond("rows")
    return reason or refusal_of_sizes(sizes, tile, vmem_bytes(), blocks.rows)


def forward(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    *,
    residuals: bool,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None = None,
    interpret=False,
) -> tuple[Array, RecurrentCache, Residuals | None]:
    """Runs L layers, one kernel after the other, from position 0."""
    B, T, _ = x.shape
    options = {"spec": spec, "schedule": schedule, "tile": tile, "blocks": blocks}
    tile, blocks = choose("mosaic_tpu", x, weights, cache, **options)
    weights, spec = key_head_for_each(weights, spec=spec), ungrouped(spec)
    vmem, sizes = vmem_bytes(), LayerSizes.of(x, weights, spec)
    tiles = choose_tiles(sizes, tile, vmem, forward_bytes, blocks.rows)
    launch = Launch(spec=spec, tiles=tiles, vmem=vmem, interpret=interpret)
    x_rows = x.astype(jnp.float32).swapaxes(0, 1)

    def layer(x, w):
        out = run_layer(launch, x, jax.tree.map(lambda leaf: leaf[None], w))
        return out.z, (out.z, out.attended, out.lse) if residuals else None

    last, kept = jax.lax.scan(
        layer,
        tiles.whole_tiles(x_rows, time=0, batch=1),
        prepare(weights, spec.dtype),
    )
    z = last[:T, :B].swapaxes(0, 1).astype(x.dtype)
    if kept is not None:
        kept_z, attended, lse = (part[:, :T, :B].swapaxes(1, 2) for part in kept)
        heads = (*attended.shape[:3], spec.heads, spec.head_width)
        kept = Residuals(kept_z, attended.reshape(heads), lse)
    return z, cache, kept


def backward(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    residuals: Residuals,
    dz: Float[Array, "B T D"],
    dcache: RecurrentCache,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None = None,
    interpret=False,
) -> tuple[Array, LayerWeights, RecurrentCache]:
    """Returns the gradients of x, weights and cache."""
    options = {"spec": spec, "schedule": schedule, "tile": tile, "blocks": blocks}
    tile, blocks = choose("mosaic_tpu", x, weights, cache, **options)
    weights, back = jax.vjp(partial(key_head_for_each, spec=spec), weights)
    spec = ungrouped(spec)
    vmem, sizes = vmem_bytes(), LayerSizes.of(x, weights, spec)
    tiles = choose_tiles(sizes, tile, vmem, backward_bytes, blocks.rows)
    launch = Launch(spec=spec, tiles=tiles, vmem=vmem, interpret=interpret)
    inputs = Inputs(x, weights, cache, rows, residuals, dz, dcache)
    kernels = mosaic_kernels(launch)
    dx, dweights, dcache = run_backward(
        inputs, kernels, replace(tiles, keys=tiles.tile), spec=spec, together=False
    )
    return dx, *back(dweights), dcache


def ungrouped(spec: LayerSpec) -> LayerSpec:
    """Returns the spec with as many key heads as heads."""
    return replace(spec, key_heads=spec.heads)


def key_head_for_each(weights: LayerWeights, *, spec: LayerSpec) -> LayerWeights:
    """Gives each query head its own copy of its key head: the same layer.

    A k-norm over all copies has the mean over one of each. The kernels then compute and
    keep as many pairs as the layer has heads.
    """
    copies = spec.heads // spec.key_heads
    if copies == 1:
        return weights

    def repeat(part: Array | None) -> Array | None:
        """Repeats the heads of [..., K, E]."""
        return None if part is None else jnp.repeat(part, copies, axis=-2)

    def repeat_flat(part: Array | None) -> Array | None:
        """Repeats the heads of [L, K E]."""
        if part is None:
            return None
        heads = part.reshape(len(part), spec.key_heads, spec.head_width)
        return jnp.repeat(heads, copies, axis=1).reshape(len(part), -1)

    return weights._replace(
        w_k=repeat(weights.w_k),
        w_v=repeat(weights.w_v),
        b_k=repeat(weights.b_k),
        b_v=repeat(weights.b_v),
        k_norm_scale=repeat_flat(weights.k_norm_scale),
        k_norm_bias=repeat_flat(weights.k_norm_bias),
    )
