"""The XLA path: every switch, every platform, all three schedules."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerWeights,
    RecurrentCache,
    Residuals,
    Rows,
)
from pallas_kernels.recurrent_prefill.attention_gradients import PairGradients
from pallas_kernels.recurrent_prefill.cache_write import write
from pallas_kernels.recurrent_prefill.equations import Prepared, prepare
from pallas_kernels.recurrent_prefill.geometry import (
    Geometry,
    from_slots,
    plan,
    to_slots,
)
from pallas_kernels.recurrent_prefill.pairs import Pairs, to_rows
from pallas_kernels.recurrent_prefill.spec import LayerSpec
from pallas_kernels.recurrent_prefill.tile_sizes import choose_tiles
from pallas_kernels.recurrent_prefill.visibility import Placement, place_rows
from pallas_kernels.recurrent_prefill.xla_backward import run_layers_backward
from pallas_kernels.recurrent_prefill.xla_forward import run_layers


def supported(x, weights, cache, rows, *, spec, schedule, tile) -> str | None:
    """Returns None: there is nothing that this backend cannot do."""
    return None


def forward(
    x: Array,
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    *,
    residuals: bool,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
) -> tuple[Array, RecurrentCache, Residuals | None]:
    """Runs L layers, one after the other or all at once."""
    call = _Call.of(x, weights, cache, rows, spec, schedule, tile)
    w = prepare(weights, spec.dtype)
    run = lambda x, w, cache: run_layers(  # noqa: E731
        x, w, cache, call.place, geometry=call.geometry, spec=spec
    )
    start = to_slots(x.astype(call.wide), call.phase, call.geometry.positions)
    if call.together:
        outcome = run(start, w, cache)
        last = outcome.z[-1]
    else:
        last, outcome = jax.lax.scan(
            partial(_one_layer, run), start, (w, _by_layer(cache))
        )
    z = from_slots(last, call.phase, x.shape[1], time=0)
    z = jnp.moveaxis(z, 0, 1).astype(x.dtype)
    if cache.slots:
        persistent = _positions(outcome.persistent, call, x.shape[1])
        temporary = outcome.temporary
        if temporary is not None:
            temporary = _positions(temporary, call, x.shape[1])
        cache = write(cache, persistent, temporary, rows, spec)
    kept = Residuals(outcome.z, outcome.attended, outcome.log_normalizer)
    return z, cache, kept if residuals else None


def backward(
    x: Array,
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    residuals: Residuals,
    for_z: Array,
    for_cache: RecurrentCache,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
) -> tuple[Array, LayerWeights, RecurrentCache]:
    """Returns the gradients of x, weights and cache; `position` stands for none."""
    call = _Call.of(x, weights, cache, rows, spec, schedule, tile)
    T = x.shape[1]
    w = prepare(weights, spec.dtype)
    for_pairs, of_cache = _of_written(for_cache, x, cache, rows, call, spec)
    start = to_slots(x.astype(call.wide), call.phase, call.geometry.positions)
    x_in = jnp.concatenate([start[None], residuals.z[:-1]])
    above = to_slots(for_z.astype(call.wide), call.phase, call.geometry.positions)

    def run(above, x, residuals, w, cache, for_pairs):
        for_persistent, for_temporary = for_pairs
        return run_layers_backward(
            above,
            for_persistent,
            for_temporary,
            x,
            residuals,
            w,
            cache,
            call.place,
            geometry=call.geometry,
            spec=spec,
        )

    if call.together:
        of = run(above, x_in, residuals, w, cache, for_pairs)
    else:
        layers = (x_in, residuals, w, _by_layer(cache), for_pairs)
        for_x, of = jax.lax.scan(
            partial(_one_layer_back, run),
            above,
            layers,
            reverse=True,
        )
        of = of._replace(x=for_x)
    for_x = from_slots(of.x, call.phase, T, time=0)
    _, pull = jax.vjp(lambda weights: prepare(weights, call.wide), weights)
    (for_weights,) = pull(of.weights)
    if of.cached is not None:
        of_cache = _add_cached(of_cache, of.cached, cache)
    return jnp.moveaxis(for_x, 0, 1).astype(x.dtype), for_weights, of_cache


class _Call(NamedTuple):
    """What forward and backward work out of a call's arguments."""

    geometry: Geometry
    place: Placement
    phase: Array | None
    wide: jnp.dtype
    together: bool

    @classmethod
    def of(cls, x, weights, cache, rows, spec, schedule, tile) -> "_Call":
        T, L = x.shape[1], weights.w_q.shape[0]
        schedule = "prefix" if schedule is None else schedule
        together = schedule == "wavefront" or L == 1
        phased = cache.slots > 0 and spec.block > 1 and T > 1
        sizes = choose_tiles(
            positions=T, block=spec.block, schedule=schedule, tile=tile
        )
        unit = spec.block if phased else min(spec.block, T)
        geometry = plan(
            layers=L if together else 1,
            positions=T,
            unit=unit,
            tile=sizes.tile,
            chunk=sizes.chunk,
            phased=phased,
            doubling=schedule == "tiled",
        )
        wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), spec.dtype)
        phase = cache.position % spec.block if phased else None
        segments = rows.segments
        if segments is not None:
            segments = to_slots(segments, phase, geometry.slots)
        place = place_rows(cache, segments, phase, geometry, spec, wide)
        return cls(geometry, place, phase, wide, together)


def _one_layer(run, x: Array, layer: tuple[Prepared, RecurrentCache]):
    """Runs one layer of a scan: the layers' axis comes back as an axis of one."""
    w, cache = layer
    w, pairs = jax.tree.map(lambda leaf: leaf[None], (w, cache._replace(position=None)))
    outcome = run(x, w, pairs._replace(position=cache.position))
    outcome = jax.tree.map(lambda leaf: leaf[0], outcome)
    return outcome.z, outcome


def _by_layer(cache: RecurrentCache) -> RecurrentCache:
    """Repeats the position for every layer, for a scan over layers."""
    L = cache.keys.shape[0]
    position = jnp.broadcast_to(cache.position, (L, *cache.position.shape))
    return cache._replace(position=position)


def _positions(pairs: Pairs, call: _Call, T: int) -> tuple[Array, Array]:
    """Takes the rows [L, T, B, K, E] of the call's T positions out of pairs."""
    k, v = (from_slots(part, call.phase, T, time=1) for part in to_rows(pairs))
    return k, v


def _one_layer_back(run, above: Array, layer: tuple):
    """Runs one layer of a reverse scan."""
    x, residuals, w, cache, for_pairs = layer
    position = cache.position
    layer = (x, residuals, w, cache._replace(position=None), for_pairs)
    x, residuals, w, cache, for_pairs = jax.tree.map(lambda leaf: leaf[None], layer)
    of = run(above, x, residuals, w, cache._replace(position=position), for_pairs)
    return of.x, jax.tree.map(lambda leaf: leaf[0], of._replace(x=None))


def _of_written(
    for_cache: RecurrentCache,
    x: Array,
    cache: RecurrentCache,
    rows: Rows,
    call: "_Call",
    spec: LayerSpec,
) -> tuple[tuple, RecurrentCache]:
    """Takes the new cache's gradient back to the new pairs and the old cache."""
    if not cache.slots:
        return (None, None), jax.tree.map(jnp.zeros_like, cache)
    B, T = x.shape[:2]
    L, size = cache.keys.shape[0], call.geometry.positions
    shape = (L, B, spec.key_heads, spec.head_width, size)
    zero = PairGradients(jnp.zeros(shape, call.wide), jnp.zeros(shape, call.wide))
    temporary = zero if spec.block > 1 else None

    def write_floats(old, persistent, temporary):
        before = RecurrentCache(*old, position=cache.position)
        new = _positions(_as_pairs(persistent), call, T)
        if temporary is not None:
            temporary = _positions(_as_pairs(temporary), call, T)
        return write(before, new, temporary, rows, spec)[:4]

    _, pull = jax.vjp(write_floats, cache[:4], zero, temporary)
    of_old, *for_pairs = pull(for_cache[:4])
    return tuple(for_pairs), RecurrentCache(*of_old, position=cache.position)


def _as_pairs(gradients: PairGradients) -> Pairs:
    """Gives arrays that lie as pair gradients do the layout of pairs."""
    return Pairs(gradients.keys, jnp.swapaxes(gradients.values, 3, 4))


def _add_cached(of_cache: RecurrentCache, more: PairGradients, cache: RecurrentCache):
    """Adds gradients [L, B, K, E, S + M] of the cached pairs that were attended to."""
    k, v = (jnp.moveaxis(part, 4, 2) for part in more)
    S = cache.slots
    parts = {
        "keys": k[:, :, :S],
        "values": v[:, :, :S],
        "temporary_keys": k[:, :, S:],
        "temporary_values": v[:, :, S:],
    }
    return of_cache._replace(
        **{
            name: getattr(of_cache, name) + part.astype(getattr(cache, name).dtype)
            for name, part in parts.items()
        }
    )
