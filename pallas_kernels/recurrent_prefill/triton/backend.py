"""GPU path: Pallas kernels lowered by Triton around the loop over positions.

`choose_schedule` says in which order a training call runs its layers where the caller
leaves it open. Layer by layer a position of each layer launches its kernels; in a
wavefront one launch serves all layers. But layers start and end a tile apart: between
its first and last tile a layer computes as often as there are tiles, and what XLA
computes of a tile it computes of idle layers too. So the choice is between launches and
bytes, which are those that `recurjax plan` counts for an H100.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.call import (
    Array,
    LayerWeights,
    RecurrentCache,
    RecurrentPrefillCall,
    Residuals,
    refusal_of_kernels,
)
from pallas_kernels.recurrent_prefill.equations import PreparedWeights, prepare
from pallas_kernels.recurrent_prefill.tiles.backward import run_backward
from pallas_kernels.recurrent_prefill.tiles.layout import from_slots
from pallas_kernels.recurrent_prefill.triton.backward import triton_kernels
from pallas_kernels.recurrent_prefill.triton.forward import (
    run_layer,
    run_layers,
    run_tile,
)
from pallas_kernels.recurrent_prefill.triton.launch import (
    Launch,
    Pass,
    choose_tiles,
    refusal_of_blocks,
    refusal_of_tile,
    refusal_of_width,
)
from pallas_kernels.recurrent_prefill.triton.products import Folded
from pallas_kernels.target import refusal_of_triton, shared_memory_bytes

LAUNCHES = 18
"""Of a position and layer in both passes, layer by layer."""
BYTES_A_LAUNCH = 6.7e6
"""What an H100's memory moves in the 2 us that a kernel takes to start."""
_TILE = 32
_MOST_HELD = 12e9
"""Bytes that a wavefront may hold beyond what layers hold one after the other: some
fifth of the memory of a GPU of a data centre."""
_LARGE_SHARED_MEMORY = 160_000
"""Bytes that those have, and others have not: 8.0 and 9.0, not 8.6, 8.9 and 12.0."""


def choose_schedule(
    schedule: str | None, x: Any, weights: LayerWeights, cache: RecurrentCache
) -> str:
    """Returns the caller's order of work, or the one that should take less time.

    A training step is bound by what takes longest, launches or bytes. A wavefront has
    the fewer launches and the more bytes: it is taken where, layer by layer, launches
    take longer than all that it moves.

    Args:
      x: [B, T, D], as weights and cache an array or what is known of its shape.
    """
    if schedule is not None:
        return schedule
    (B, T, D), L = x.shape, weights.w_q.shape[0]
    if L == 1 or cache.slots or shared_memory_bytes() < _LARGE_SHARED_MEMORY:
        return "prefix"
    matrices = [leaf for leaf in jax.tree.leaves(weights) if leaf.ndim > 2]
    W = sum(leaf.size for leaf in matrices) / L
    # Bytes a layer, fitted to the 300M model's step at 8 to 128 rows in bfloat16: its
    # weights at every position, rows; then, at each of L - 1 steps more, the weights'
    # gradients and a tile's rows.
    moved = T * (4.6 * W + 1225 * B * D) + (L - 1) * (40 * W + 328 * B * D * _TILE)
    held = 16.4 * B * T * L * D
    launched = T * LAUNCHES * BYTES_A_LAUNCH
    return "wavefront" if moved < launched and held < _MOST_HELD else "prefix"


def supported(call: RecurrentPrefillCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    return refusal_of_triton() or expressible(call)


def expressible(call: RecurrentPrefillCall) -> str | None:
    """Returns what of a call the kernels do not do on the target's kind of GPU."""
    reason = refusal_of_kernels(call)
    if reason is not None:
        return reason
    spec = call.spec
    if spec.rope_base is not None:
        return "has no rotary embedding"
    if call.rows.segments is not None:
        return "has no segments"
    if call.options.schedule == "naive":
        return 'runs tiles: schedule "prefix" or "wavefront"'
    if spec.head_width < 16 or spec.head_width & (spec.head_width - 1):
        return f"head_width must be a power of two from 16, got {spec.head_width}"
    widths = {
        "D": call.x.shape[2],
        "F": call.weights.w_up.shape[2],
        "heads * head_width": spec.heads * spec.head_width,
        "key_heads * head_width": spec.key_heads * spec.head_width,
    }
    reasons = (refusal_of_width(name, width) for name, width in widths.items())
    reason = next(filter(None, reasons), None)
    if reason is not None:
        return reason
    call = _scheduled(call)
    tile, blocks = call.options.tile, call.options.blocks
    reason = refusal_of_tile(tile)
    if reason is not None or not blocks.given():
        return reason
    # The backward pass needs no more with these sizes.
    launch = _launch(call, "forward")
    return refusal_of_blocks(launch.tiles, spec, launch.shared)


def reads_pending(call: RecurrentPrefillCall) -> bool:
    """Returns False: the kernels read pairs of the cache that are all written."""
    del call
    return False


def forward(
    call: RecurrentPrefillCall, *, residuals: bool
) -> tuple[tuple[Array, RecurrentCache], Residuals | None]:
    """Runs L layers, one after the other or, as a wavefront, all at once."""
    call = _scheduled(call)
    (x, weights, cache, _, _), spec = call, call.spec
    B, T, _ = x.shape
    launch = _launch(call, "forward")
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
        w: PreparedWeights,
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
        saved = None
        if residuals:
            attended = out.attended[:, :, :B].swapaxes(1, 2)
            saved = Residuals(
                z=out.z[:, :, :B].swapaxes(1, 2),
                attended=attended.reshape(*attended.shape[:3], -1, spec.head_width),
                lse=jnp.moveaxis(out.lse, 3, 1)[:, :B],
            )
        pairs = None if training else (out.keys, out.values)
        return out.z[-1], (pairs, saved)

    if call.options.schedule == "wavefront" or w.w_kv.shape[0] == 1:
        last, (pairs, saved) = layers(x_rows, w, folded, keys, values)
    else:

        def layer(x, inputs):
            last, out = layers(x, *jax.tree.map(lambda leaf: leaf[None], inputs))
            return last, jax.tree.map(lambda leaf: leaf[0], out)

        last, (pairs, saved) = jax.lax.scan(layer, x_rows, (w, folded, keys, values))
    if pairs is not None:
        seen = call.seen
        # What padding wrote is taken back.
        real = (jnp.arange(cache.slots) < seen[:, None])[:, :, None, None]
        new_keys, new_values = (
            jnp.where(real, from_slots(new, old), old)
            for new, old in zip(pairs, (cache.keys, cache.values), strict=True)
        )
        cache = cache._replace(
            keys=new_keys, values=new_values, position=seen, written=seen
        )
    return (last[:, :B].swapaxes(0, 1).astype(x.dtype), cache), saved


def backward(
    call: RecurrentPrefillCall,
    residuals: Residuals,
    cotangents: tuple[Array, RecurrentCache],
) -> RecurrentPrefillCall:
    """Returns gradients in place of the arrays."""
    call = _scheduled(call)
    launch = _launch(call, "backward")
    kernels = lambda active: triton_kernels(replace(launch, active=active))  # noqa: E731
    together = call.options.schedule == "wavefront"
    return run_backward(
        call, residuals, cotangents, kernels, launch.tiles, together=together
    )


def _scheduled(call: RecurrentPrefillCall) -> RecurrentPrefillCall:
    """Returns the call with the order of work that it is run in."""
    options = call.options
    schedule = choose_schedule(options.schedule, call.x, call.weights, call.cache)
    return call._replace(options=replace(options, schedule=schedule))


def _launch(call: RecurrentPrefillCall, direction: Pass) -> Launch:
    tile, blocks = call.options.tile, call.options.blocks
    shared = shared_memory_bytes()
    tiles = choose_tiles(
        batch=call.x.shape[0],
        tile=tile,
        spec=call.spec,
        shared=shared,
        direction=direction,
        schedule=call.options.schedule,
        blocks=blocks,
    )
    return Launch(
        spec=call.spec, tiles=tiles, shared=shared, interpret=call.options.interpret
    )
