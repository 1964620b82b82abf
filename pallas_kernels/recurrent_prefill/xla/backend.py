"""The XLA path: every switch, every platform, all three schedules.

`Tiling` is what both passes derive from a call. The forward pass writes the call's new
pairs into the cache, each row at its own position; the backward pass takes the new
cache's gradient to the new pairs and the old cache.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.recurrent_prefill.call import (
    Array,
    RecurrentCache,
    RecurrentPrefillCall,
    Residuals,
)
from pallas_kernels.recurrent_prefill.equations import PreparedWeights, prepare
from pallas_kernels.recurrent_prefill.xla import one_position
from pallas_kernels.recurrent_prefill.xla.attention import (
    Pairs,
    Visibility,
    to_rows,
    visibility_of,
)
from pallas_kernels.recurrent_prefill.xla.backward import (
    PairGradients,
    run_layers_backward,
)
from pallas_kernels.recurrent_prefill.xla.forward import run_layers
from pallas_kernels.recurrent_prefill.xla.geometry import (
    Geometry,
    from_below,
    from_slots,
    of_last_stage,
    plan,
    to_slots,
)


class Tiling(NamedTuple):
    """The sizes that forward and backward derive from a call."""

    geometry: Geometry
    visibility: Visibility
    phase: Array | None
    wide: jnp.dtype
    together: bool

    @classmethod
    def of(cls, call: RecurrentPrefillCall) -> "Tiling":
        """Cuts the call by the caller's sizes or the heuristic."""
        spec, cache, stages = call.spec, call.cache, call.options.stages
        tile, blocks = call.options.tile, call.options.blocks
        T, L = call.x.shape[1], call.weights.w_q.shape[0]
        schedule = call.options.schedule or "prefix"
        together = schedule == "wavefront" or L == 1
        # With a real cache, rows may stand at different places within their blocks.
        phased = cache.slots > 0 and spec.block > 1 and T > 1
        tile, chunk = tile_and_chunk(
            positions=T,
            block=spec.block,
            schedule=schedule,
            tile=tile,
            keys=blocks.keys,
        )
        unit = spec.block if phased else min(spec.block, T)
        geometry = plan(
            layers=L if together else 1,
            positions=T,
            unit=unit,
            tile=tile,
            chunk=chunk,
            phased=phased,
            stages=stages.count,
            axis=stages.axis,
        )
        dtype = call.x.dtype
        wide = jnp.promote_types(jnp.promote_types(dtype, jnp.float32), spec.dtype)
        phase = cache.position % spec.block if phased else None
        segments = call.rows.segments
        if segments is not None:
            segments = to_slots(segments, phase, geometry.slots)
        visibility = visibility_of(cache, segments, phase, geometry, spec, wide)
        return cls(geometry, visibility, phase, wide, together)


def tile_and_chunk(
    *, positions: int, block: int, schedule: str, tile: int | None, keys: int | None
) -> tuple[int, int]:
    """Returns b, positions of a tile, and how many keys of its prefix are read at once.

    The caller's sizes, or tiles of about one size and at most 64 positions, which
    measured fastest on two CPU cores, forward and backward. 8 rows: at 256 positions of
    width 128, 64 takes 7 % less time than 32 and 4 % less than 128; at 1024 of width
    256, 12 % and 28 % less. 32 rows of 64 positions of width 96: a training step takes
    7 % less with one tile of 64 than with two. `plan` rounds the keys up to full tiles.
    """
    if schedule == "naive":
        return block, 256 if keys is None else keys
    if tile is None:
        tiles = -(-positions // 64)
        tile = -(-positions // (tiles * block)) * block
    return tile, 128 if keys is None else keys


def write(
    call: RecurrentPrefillCall,
    persistent: tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]],
    temporary: tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]] | None,
) -> RecurrentCache:
    """Writes rows of keys and values [L, T, B, K, E]; padding is dropped.

    Temporary pairs stay for the rows' unfinished blocks only.
    """
    cache, (T, B) = call.cache, persistent[0].shape[1:3]
    offset = jnp.arange(T)
    count = jnp.full(B, T) if call.rows.lengths is None else call.rows.lengths
    at = cache.position[:, None] + offset  # [B, T]
    real = offset < count[:, None]
    seen = (cache.position + count).astype(cache.position.dtype)
    keys, values = (
        _put(old, new, at, real)
        for old, new in zip((cache.keys, cache.values), persistent, strict=True)
    )
    cache = cache._replace(keys=keys, values=values, position=seen, written=seen)
    if temporary is None:
        return cache
    c = call.spec.block
    unfinished = real & (at // c == seen[:, None] // c)
    keys, values = (
        _put(old, new, at % c, unfinished)
        for old, new in zip(
            (cache.temporary_keys, cache.temporary_values), temporary, strict=True
        )
    )
    return cache._replace(temporary_keys=keys, temporary_values=values)


def _put(old: Array, new: Array, slot: Array, keep: Array) -> Array:
    B, T = slot.shape
    # Out of range they are dropped; no two are one, so that the scatter needs no order.
    slot = jnp.where(keep, slot, old.shape[2] + jnp.arange(T))
    index = (slice(None), jnp.arange(B)[:, None], slot)
    new = jnp.swapaxes(new, 1, 2).astype(old.dtype)  # [L, B, T, K, E]
    return old.at[index].set(new, mode="drop", unique_indices=True)


def positions_of_call(
    pairs: Pairs, tiling: Tiling, T: int
) -> tuple[Float[Array, "L T B K E"], Float[Array, "L T B K E"]]:
    """Slices the rows [L, T, B, K, E] of the call's T positions from pairs."""
    k, v = (from_slots(part, tiling.phase, T, time=1) for part in to_rows(pairs))
    return k, v


def written_backward(
    call: RecurrentPrefillCall, dcache: RecurrentCache, tiling: Tiling
) -> tuple[tuple, RecurrentCache]:
    """Propagates the new cache's gradient to the new pairs and the old cache."""
    cache, spec = call.cache, call.spec
    if not cache.slots:
        return (None, None), jax.tree.map(jnp.zeros_like, cache)
    B, T = call.x.shape[:2]
    L, size = cache.keys.shape[0], tiling.geometry.positions
    shape = (L, B, spec.key_heads, spec.head_width, size)
    zero = PairGradients(jnp.zeros(shape, tiling.wide), jnp.zeros(shape, tiling.wide))
    temporary = zero if spec.block > 1 else None

    def write_floats(old, persistent, temporary):
        before = cache._replace(**dict(zip(_PAIRS, old, strict=True)))
        new = positions_of_call(_as_pairs(persistent), tiling, T)
        if temporary is not None:
            temporary = positions_of_call(_as_pairs(temporary), tiling, T)
        return write(call._replace(cache=before), new, temporary)[:4]

    # Writing is linear in the pairs, so its vjp may be taken at zeros.
    _, pull = jax.vjp(write_floats, cache[:4], zero, temporary)
    dold, *dpairs = pull(dcache[:4])
    # All pairs are written behind such a call: no one reads what one is made of.
    dcache = dcache._replace(source=jnp.zeros_like(cache.source))
    return tuple(dpairs), dcache._replace(**dict(zip(_PAIRS, dold, strict=True)))


_PAIRS = ("keys", "values", "temporary_keys", "temporary_values")
"""Those of a cache's fields that hold pairs, its first four."""


def _as_pairs(gradients: PairGradients) -> Pairs:
    """Gives arrays that lie as pair gradients do the layout of pairs."""
    return Pairs(gradients.dk, jnp.swapaxes(gradients.dv, 3, 4))


def add_cached(dold: RecurrentCache, more: PairGradients, cache: RecurrentCache):
    """Adds gradients [L, B, K, E, S + open] of the cached pairs that were read."""
    k, v = (jnp.moveaxis(part, 4, 2) for part in more)
    S = cache.slots
    parts = {
        "keys": k[:, :, :S],
        "values": v[:, :, :S],
        "temporary_keys": k[:, :, S:],
        "temporary_values": v[:, :, S:],
    }
    return dold._replace(
        **{
            name: getattr(dold, name) + part.astype(getattr(cache, name).dtype)
            for name, part in parts.items()
        }
    )


def supported(call: RecurrentPrefillCall) -> str | None:
    """Returns None but for block sizes of kernels: there is nothing it cannot do."""
    blocks = call.options.blocks
    return None if blocks is None else blocks.refusal_beyond("keys")


def reads_pending(call: RecurrentPrefillCall) -> bool:
    """Returns whether it makes the pair that a decode step has left on its own."""
    return one_position.serves(call)


def forward(
    call: RecurrentPrefillCall, *, residuals: bool
) -> tuple[tuple[Array, RecurrentCache], Residuals | None]:
    """Runs L layers, one after the other or all at once; on stages, a stage's."""
    if one_position.serves(call):
        # One position in any order of work is the same work.
        return one_position.forward(call), None
    (x, weights, cache, _, _), spec = call, call.spec
    tiling = Tiling.of(call)
    w = prepare(weights, spec.dtype)
    run = lambda x, w, cache: run_layers(  # noqa: E731
        x, w, cache, tiling.visibility, geometry=tiling.geometry, spec=spec
    )
    start = to_slots(x.astype(tiling.wide), tiling.phase, tiling.geometry.positions)
    if tiling.together:
        outcome = run(start, w, cache)
        last = of_last_stage(outcome.z[-1], tiling.geometry)
    else:
        last, outcome = jax.lax.scan(
            partial(_one_layer, run), start, (w, _by_layer(cache))
        )
    z = from_slots(last, tiling.phase, x.shape[1], time=0)
    z = jnp.moveaxis(z, 0, 1).astype(x.dtype)
    if cache.slots:
        persistent = positions_of_call(outcome.persistent, tiling, x.shape[1])
        temporary = outcome.temporary
        if temporary is not None:
            temporary = positions_of_call(temporary, tiling, x.shape[1])
        cache = write(call, persistent, temporary)
    saved = Residuals(outcome.z, outcome.attended, outcome.lse)
    return (z, cache), saved if residuals else None


def backward(
    call: RecurrentPrefillCall,
    residuals: Residuals | None,
    cotangents: tuple[Array, RecurrentCache],
) -> RecurrentPrefillCall:
    """Returns gradients in place of the arrays; on stages, dx's part of each."""
    if residuals is None:  # A decode step has none.
        return one_position.backward(call, cotangents)
    (x, weights, cache, _, _), spec = call, call.spec
    (dz, dcache), T = cotangents, x.shape[1]
    tiling = Tiling.of(call)
    w = prepare(weights, spec.dtype)
    dpairs, dold = written_backward(call, dcache, tiling)
    size = tiling.geometry.positions
    start = to_slots(x.astype(tiling.wide), tiling.phase, size)
    x_in = from_below(start[None], residuals.z, tiling.geometry)
    above = to_slots(dz.astype(tiling.wide), tiling.phase, size)

    def run(above, x, residuals, w, cache, dpairs):
        dpersistent, dtemporary = dpairs
        return run_layers_backward(
            above,
            dpersistent,
            dtemporary,
            x,
            residuals,
            w,
            cache,
            tiling.visibility,
            geometry=tiling.geometry,
            spec=spec,
        )

    if tiling.together:
        of = run(above, x_in, residuals, w, cache, dpairs)
    else:
        layers = (x_in, residuals, w, _by_layer(cache), dpairs)
        dx, of = jax.lax.scan(
            partial(_one_layer_back, run),
            above,
            layers,
            reverse=True,
        )
        of = of._replace(x=dx)
    dx = from_slots(of.x, tiling.phase, T, time=0)
    # `prepare` only lays weights out: its transpose lays their gradients back, and in a
    # wide dtype it rounds nothing.
    _, pull = jax.vjp(lambda weights: prepare(weights, tiling.wide), weights)
    (dweights,) = pull(of.weights)
    if of.cached is not None:
        dold = add_cached(dold, of.cached, cache)
    return call.with_gradients(jnp.moveaxis(dx, 0, 1).astype(x.dtype), dweights, dold)


def _one_layer(run, x: Array, layer: tuple[PreparedWeights, RecurrentCache]):
    """Runs one layer of a scan: the layers' axis comes back as an axis of one."""
    # The position has no axis of layers in the op, but every layer reads it.
    w, cache = layer
    w, pairs = jax.tree.map(lambda leaf: leaf[None], (w, cache._replace(position=None)))
    outcome = run(x, w, pairs._replace(position=cache.position))
    outcome = jax.tree.map(lambda leaf: leaf[0], outcome)
    return outcome.z, outcome


def _by_layer(cache: RecurrentCache) -> RecurrentCache:
    """Repeats the position for every layer, for a scan over layers."""
    L = cache.keys.shape[0]
    position = jnp.broadcast_to(cache.position, (L, *cache.position.shape))
    return cache._replace(position=position, written=None)


def _one_layer_back(run, above: Array, layer: tuple):
    """Runs one layer of a reverse scan."""
    x, residuals, w, cache, dpairs = layer
    position = cache.position
    layer = (x, residuals, w, cache._replace(position=None), dpairs)
    x, residuals, w, cache, dpairs = jax.tree.map(lambda leaf: leaf[None], layer)
    of = run(above, x, residuals, w, cache._replace(position=position), dpairs)
    return of.x, jax.tree.map(lambda leaf: leaf[0], of._replace(x=None))
