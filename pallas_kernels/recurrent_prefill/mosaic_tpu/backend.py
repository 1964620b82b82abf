"""TPU path: one kernel runs a layer's complete loop with its weights in VMEM."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels.recurrent_prefill.call import (
    Array,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    RecurrentPrefillCall,
    Residuals,
    refusal_of_kernels,
)
from pallas_kernels.recurrent_prefill.equations import prepare
from pallas_kernels.recurrent_prefill.mosaic_tpu.attention import Filled, Segments
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
from pallas_kernels.recurrent_prefill.tiles.backward import run_backward
from pallas_kernels.recurrent_prefill.tiles.layout import Tiles
from pallas_kernels.target import refusal_of_mosaic_tpu, vmem_bytes


def supported(call: RecurrentPrefillCall) -> str | None:
    """Returns why the kernels cannot run this call, None when they can."""
    return refusal_of_mosaic_tpu() or expressible(call)


def expressible(call: RecurrentPrefillCall) -> str | None:
    """Returns what of a call the kernels do not do, whatever the device."""
    reason, schedule = refusal_of_kernels(call), call.options.schedule
    if reason is not None:
        return reason
    if schedule not in (None, "prefix"):
        return f'runs tiles of one layer: schedule "prefix", got {schedule!r}'
    tile, blocks = call.options.tile, call.options.blocks
    sizes = LayerSizes.of(call.x, call.weights, call.spec)
    reason = blocks.refusal_beyond("rows")
    return reason or refusal_of_sizes(sizes, tile, vmem_bytes(), blocks.rows)


def reads_pending(call: RecurrentPrefillCall) -> bool:
    """Returns False: the kernels read pairs of the cache that are all written."""
    del call
    return False


def forward(
    call: RecurrentPrefillCall, *, residuals: bool
) -> tuple[tuple[Array, RecurrentCache], Residuals | None]:
    """Runs L layers, one kernel after the other."""
    (x, _, cache, rows, _), spec = call, ungrouped(call.spec)
    B, T, _ = x.shape
    copies = call.spec.heads // call.spec.key_heads
    weights = key_head_for_each(call.weights, spec=call.spec)
    launch = _launch(call, weights, forward_bytes)
    tiles = launch.tiles
    x_rows = x.astype(jnp.float32).swapaxes(0, 1)
    seen = call.seen

    segments = rows.segments
    if segments is not None:
        segments = _segments(tiles, segments)

    rotary = tiles.rotation(cache, T, spec)

    def layer(x, inputs):
        w, keys, values = jax.tree.map(lambda leaf: leaf[None], inputs)
        filled = slots = None
        if cache.slots:
            old = copied_pairs(keys, values, copies)
            filled = _filled(tiles, cache._replace(keys=old[0], values=old[1]), spec)
        out = run_layer(launch, x, w, filled, segments, rotary, positions=T)
        if cache.slots:
            slots = [
                _put(old[0], new[:B, :T], copies, cache.position, seen)
                for old, new in ((keys, out.keys), (values, out.values))
            ]
        return out.z, (slots, (out.z, out.attended, out.lse) if residuals else None)

    last, (slots, saved) = jax.lax.scan(
        layer,
        tiles.whole_tiles(x_rows, time=0, batch=1),
        (prepare(weights, spec.dtype), cache.keys, cache.values),
    )
    if slots is not None:
        cache = cache._replace(
            keys=slots[0], values=slots[1], position=seen, written=seen
        )
    z = last[:T, :B].swapaxes(0, 1).astype(x.dtype)
    if saved is not None:
        all_z, attended, lse = (part[:, :T, :B].swapaxes(1, 2) for part in saved)
        heads = (*attended.shape[:3], spec.heads, spec.head_width)
        saved = Residuals(all_z, attended.reshape(heads), lse)
    return (z, cache), saved


def backward(
    call: RecurrentPrefillCall,
    residuals: Residuals,
    cotangents: tuple[Array, RecurrentCache],
) -> RecurrentPrefillCall:
    """Returns gradients in place of the arrays."""
    dz, dcache = cotangents
    cache, spec = call.cache, call.spec
    copies = spec.heads // spec.key_heads
    weights, back = jax.vjp(partial(key_head_for_each, spec=spec), call.weights)
    pairs, cache_back = jax.vjp(
        partial(copied_pairs, copies=copies), cache.keys, cache.values
    )
    cache = cache._replace(keys=pairs[0], values=pairs[1])
    # The cache that is returned has the first copy of each.
    _, first_back = jax.vjp(lambda *all_: [p[..., ::copies, :] for p in all_], *pairs)
    dkeys, dvalues = first_back([dcache.keys, dcache.values])
    dcache = dcache._replace(keys=dkeys, values=dvalues)
    launch = _launch(call, weights, backward_bytes)
    tiles, segments = launch.tiles, call.rows.segments
    if segments is not None:
        segments = tiles.whole_tiles(segments.T, time=0, batch=1)
    kernels = mosaic_kernels(launch, segments)
    of = run_backward(
        call._replace(
            weights=weights,
            cache=cache,
            options=replace(call.options, spec=ungrouped(spec)),
        ),
        residuals,
        (dz, dcache),
        lambda active: kernels,
        replace(tiles, keys=tiles.tile),
        together=False,
    )
    dkeys, dvalues = cache_back((of.cache.keys, of.cache.values))
    dcache = of.cache._replace(keys=dkeys, values=dvalues)
    (dweights,) = back(of.weights)
    return call.with_gradients(of.x, dweights, dcache)


def _launch(
    call: RecurrentPrefillCall, weights: LayerWeights, needed: Callable
) -> Launch:
    """Cuts the call by the caller's sizes or the heuristic.

    Args:
      weights: with a key head for each head.
      needed: the bytes of VMEM that the pass needs, by its sizes.
    """
    spec, blocks = ungrouped(call.spec), call.options.blocks
    tile = call.options.tile
    vmem, sizes = vmem_bytes(), LayerSizes.of(call.x, weights, spec)
    tiles = choose_tiles(sizes, tile, vmem, needed, blocks.rows)
    return Launch(spec=spec, tiles=tiles, vmem=vmem, interpret=call.options.interpret)


def _filled(tiles: Tiles, cache: RecurrentCache, spec: LayerSpec) -> Filled:
    """Lays one layer's cache out for the kernel; the cache has slots."""
    keys, values = tiles.cached_slots(cache, 0, spec)
    start = tiles.start(cache).astype(jnp.int32)
    most = jnp.max(start.reshape(-1, tiles.rows), axis=1)
    return Filled(keys[0], values[0], start, most)


def _segments(tiles: Tiles, segments: Int[Array, "B T"]) -> Segments:
    """Lays documents out for the kernel, by row and by position."""
    segments = tiles.pad_rows(segments.astype(jnp.int32), batch=0)
    by_position = tiles.whole_tiles(segments.T, time=0, batch=1)[..., None]
    missing = -segments.shape[1] % tiles.keys
    by_row = jnp.pad(segments, ((0, 0), (0, missing)))[:, None]
    return Segments(by_row, by_position)


def _put(
    slots: Float[Array, "B S K E"],
    new: Float[Array, "B T HE"],
    copies: int,
    start: Int[Array, " B"],
    seen: Int[Array, " B"],
) -> Float[Array, "B S K E"]:
    """Puts new pairs, the first of each key head's copies, into slots start to seen."""
    B, S, K, E = slots.shape
    at = start[:, None] + jnp.arange(new.shape[1])
    at = jnp.where(at < seen[:, None], at, S)  # out of range: dropped
    new = new.reshape(*new.shape[:2], K, copies, E)[:, :, :, 0].astype(slots.dtype)
    return slots.at[jnp.arange(B)[:, None], at].set(new, mode="drop")


def copied_pairs(
    keys: Float[Array, "L B S K E"], values: Float[Array, "L B S K E"], copies: int
) -> tuple[Float[Array, "L B S H E"], Float[Array, "L B S H E"]]:
    """Gives each query head its own copy of its key head's slots."""
    if copies == 1:
        return keys, values
    keys, values = (jnp.repeat(part, copies, axis=3) for part in (keys, values))
    return keys, values


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
