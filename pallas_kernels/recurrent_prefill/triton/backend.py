"""GPU path: Pallas kernels lowered by Triton around the loop over positions."""

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
from pallas_kernels.recurrent_prefill.equations import Prepared, prepare
from pallas_kernels.recurrent_prefill.mesh_layout import ONE_STAGE, Stages
from pallas_kernels.recurrent_prefill.tiles.backward import Inputs, run_backward
from pallas_kernels.recurrent_prefill.tiles.layout import from_slots
from pallas_kernels.recurrent_prefill.tiles.refusal import refusal_of_call
from pallas_kernels.recurrent_prefill.triton.backward import triton_kernels
from pallas_kernels.recurrent_prefill.triton.forward import (
    run_layer,
    run_layers,
    run_tile,
)
from pallas_kernels.recurrent_prefill.triton.launch import (
    Launch,
    refusal_of_width,
)
from pallas_kernels.recurrent_prefill.triton.order_of_work import choose_schedule
from pallas_kernels.recurrent_prefill.triton.products import Folded
from pallas_kernels.recurrent_prefill.triton.tiles import (
    Pass,
    choose_tiles,
    refusal_of_blocks,
    refusal_of_tile,
)
from pallas_kernels.target import refusal_of_triton, shared_memory_bytes


def supported(*arrays: Any, stages: Stages = ONE_STAGE, **options: Any) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    if stages.count > 1:
        return "runs no layers on several stages"
    return refusal_of_triton() or expressible(*arrays, **options)


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
    """Returns what of a call the kernels do not do on the target's kind of GPU."""
    reason = refusal_of_call(x, cache, spec)
    if reason is not None:
        return reason
    if spec.rope_base is not None:
        return "has no rotary embedding"
    if rows.segments is not None:
        return "has no segments"
    if schedule == "naive":
        return 'runs tiles: schedule "prefix" or "wavefront"'
    if spec.head_width < 16 or spec.head_width & (spec.head_width - 1):
        return f"head_width must be a power of two from 16, got {spec.head_width}"
    widths = {
        "D": x.shape[2],
        "F": weights.w_up.shape[2],
        "heads * head_width": spec.heads * spec.head_width,
        "key_heads * head_width": spec.key_heads * spec.head_width,
    }
    reasons = (refusal_of_width(name, width) for name, width in widths.items())
    reason = next(filter(None, reasons), None)
    if reason is not None:
        return reason
    schedule = choose_schedule(schedule, x, weights, cache)
    options = {"spec": spec, "schedule": schedule, "tile": tile, "blocks": blocks}
    tile, blocks = choose("triton", x, weights, cache, **options)
    reason = refusal_of_tile(tile)
    if reason is not None or not blocks.given():
        return reason
    shared = shared_memory_bytes()
    tiles = choose_tiles(
        batch=x.shape[0],
        tile=tile,
        spec=spec,
        shared=shared,
        # Backward the same sizes take no more.
        direction="forward",
        schedule=schedule,
        blocks=blocks,
    )
    return refusal_of_blocks(tiles, spec, shared)


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
    interpret: bool = False,
) -> tuple[Array, RecurrentCache, Residuals | None]:
    """Runs L layers, one after the other or, as a wavefront, all at once.

    Args:
      interpret: runs the kernels as plain JAX, on any device.
    """
    B, T, _ = x.shape
    schedule = choose_schedule(schedule, x, weights, cache)
    options = {"spec": spec, "schedule": schedule, "tile": tile, "blocks": blocks}
    launch = _launch(x, weights, cache, interpret, "forward", **options)
    tiles = launch.tiles
    w = prepare(weights, spec.dtype)
    folded = Folded.of(prepare(weights, jnp.float32), spec)
    training = cache.slots == 0
    keys, values = None, None
    if not training:
        keys, values = tiles.cached_slots(cache, T, spec)
    start = tiles.start(cache)
    x_rows = tiles.pad_rows(x.astype(jnp.float32).swapaxes(0, 1), batch=1)

    def layers(
        x: Array,
        w: Prepared,
        folded: Folded | None,
        keys: Array | None,
        values: Array | None,
    ):
        L = w.w_kv.shape[0]
        if keys is None or values is None:
            shape = tiles.training_shape(L, x.shape[0], x.shape[1], spec)
            keys, values = (launch.unwritten(shape, spec.dtype) for _ in range(2))
        if L == 1:
            run = partial(run_layer, folded, residuals=residuals)
        else:
            run = partial(run_layers, run_tile=partial(run_tile, folded))
        out = run(launch, x, w, keys, values, start, training=training)
        kept = None
        if residuals:
            attended = out.attended[:, :, :B].swapaxes(1, 2)
            kept = Residuals(
                z=out.z[:, :, :B].swapaxes(1, 2),
                attended=attended.reshape(*attended.shape[:3], -1, spec.head_width),
                lse=jnp.moveaxis(out.lse, 3, 1)[:, :B],
            )
        pairs = None if training else (out.keys, out.values)
        return out.z[-1], (pairs, kept)

    if schedule == "wavefront" or w.w_kv.shape[0] == 1:
        last, (pairs, kept) = layers(x_rows, w, folded, keys, values)
    else:

        def layer(x, inputs):
            last, out = layers(x, *jax.tree.map(lambda leaf: leaf[None], inputs))
            return last, jax.tree.map(lambda leaf: leaf[0], out)

        last, (pairs, kept) = jax.lax.scan(layer, x_rows, (w, folded, keys, values))
    if pairs is not None:
        count = T if rows.lengths is None else rows.lengths
        seen = (cache.position + count).astype(cache.position.dtype)
        # What padding wrote is taken back.
        real = (jnp.arange(cache.slots) < seen[:, None])[:, :, None, None]
        new_keys, new_values = (
            jnp.where(real, from_slots(new, old), old)
            for new, old in zip(pairs, (cache.keys, cache.values), strict=True)
        )
        cache = cache._replace(
            keys=new_keys, values=new_values, position=seen, written=seen
        )
    return last[:, :B].swapaxes(0, 1).astype(x.dtype), cache, kept


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
    interpret: bool = False,
) -> tuple[Array, LayerWeights, RecurrentCache]:
    """Returns the gradients of x, weights and cache."""
    schedule = choose_schedule(schedule, x, weights, cache)
    options = {"spec": spec, "schedule": schedule, "tile": tile, "blocks": blocks}
    launch = _launch(x, weights, cache, interpret, "backward", **options)
    inputs = Inputs(x, weights, cache, rows, residuals, dz, dcache)
    kernels = lambda active: triton_kernels(replace(launch, active=active))  # noqa: E731
    together = schedule == "wavefront"
    return run_backward(inputs, kernels, launch.tiles, spec=spec, together=together)


def _launch(
    x: Array,
    weights: LayerWeights,
    cache: RecurrentCache,
    interpret: bool,
    direction: Pass,
    *,
    spec: LayerSpec,
    schedule: str | None,
    **options: Any,
) -> Launch:
    options = {"spec": spec, "schedule": schedule, **options}
    tile, blocks = choose("triton", x, weights, cache, **options)
    shared = shared_memory_bytes()
    tiles = choose_tiles(
        batch=x.shape[0],
        tile=tile,
        spec=spec,
        shared=shared,
        direction=direction,
        schedule=schedule,
        blocks=blocks,
    )
    return Launch(spec=spec, tiles=tiles, shared=shared, interpret=interpret)
