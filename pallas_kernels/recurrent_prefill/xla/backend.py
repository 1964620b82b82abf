"""The XLA path: every switch, every platform, all three schedules."""

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
from pallas_kernels.recurrent_prefill.block_sizes import BlockSizes
from pallas_kernels.recurrent_prefill.equations import Prepared, prepare
from pallas_kernels.recurrent_prefill.mesh_layout import ONE_STAGE, Stages
from pallas_kernels.recurrent_prefill.xla import one_position
from pallas_kernels.recurrent_prefill.xla.backward import run_layers_backward
from pallas_kernels.recurrent_prefill.xla.cache import (
    add_cached,
    positions_of_call,
    write,
    written_backward,
)
from pallas_kernels.recurrent_prefill.xla.call import Call
from pallas_kernels.recurrent_prefill.xla.forward import run_layers
from pallas_kernels.recurrent_prefill.xla.geometry import (
    from_below,
    from_slots,
    of_last_stage,
    to_slots,
)


def supported(
    *arrays: Any, blocks: BlockSizes | None = None, **options: Any
) -> str | None:
    """Returns None but for block sizes of kernels: there is nothing it cannot do."""
    return None if blocks is None else blocks.refusal_beyond("keys")


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
    stages: Stages = ONE_STAGE,
) -> tuple[Array, RecurrentCache, Residuals | None]:
    """Runs L layers, one after the other or all at once; on stages, a stage's."""
    if stages.count == 1 and one_position.serves(x, cache, spec):
        # One position in any order of work is the same work.
        return *one_position.forward(x, weights, cache, rows, spec=spec), None
    sizes = {"schedule": schedule, "tile": tile, "blocks": blocks}
    call = Call.of(x, weights, cache, rows, spec=spec, stages=stages, **sizes)
    w = prepare(weights, spec.dtype)
    run = lambda x, w, cache: run_layers(  # noqa: E731
        x, w, cache, call.visibility, geometry=call.geometry, spec=spec
    )
    start = to_slots(x.astype(call.wide), call.phase, call.geometry.positions)
    if call.together:
        outcome = run(start, w, cache)
        last = of_last_stage(outcome.z[-1], call.geometry)
    else:
        last, outcome = jax.lax.scan(
            partial(_one_layer, run), start, (w, _by_layer(cache))
        )
    z = from_slots(last, call.phase, x.shape[1], time=0)
    z = jnp.moveaxis(z, 0, 1).astype(x.dtype)
    if cache.slots:
        persistent = positions_of_call(outcome.persistent, call, x.shape[1])
        temporary = outcome.temporary
        if temporary is not None:
            temporary = positions_of_call(temporary, call, x.shape[1])
        cache = write(cache, persistent, temporary, rows, spec)
    kept = Residuals(outcome.z, outcome.attended, outcome.lse)
    return z, cache, kept if residuals else None


def backward(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    residuals: Residuals | None,
    dz: Float[Array, "B T D"],
    dcache: RecurrentCache,
    *,
    spec: LayerSpec,
    schedule: str | None,
    tile: int | None,
    blocks: BlockSizes | None = None,
    stages: Stages = ONE_STAGE,
) -> tuple[Array, LayerWeights, RecurrentCache]:
    """Returns the gradients of x, weights and cache; on stages, dx's part of each."""
    if residuals is None:  # a decode step keeps none
        return one_position.backward(x, weights, cache, rows, dz, dcache, spec=spec)
    sizes = {"schedule": schedule, "tile": tile, "blocks": blocks}
    call = Call.of(x, weights, cache, rows, spec=spec, stages=stages, **sizes)
    T = x.shape[1]
    w = prepare(weights, spec.dtype)
    dpairs, dold = written_backward(dcache, x, cache, rows, call, spec)
    start = to_slots(x.astype(call.wide), call.phase, call.geometry.positions)
    x_in = from_below(start[None], residuals.z, call.geometry)
    above = to_slots(dz.astype(call.wide), call.phase, call.geometry.positions)

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
            call.visibility,
            geometry=call.geometry,
            spec=spec,
        )

    if call.together:
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
    dx = from_slots(of.x, call.phase, T, time=0)
    # `prepare` only lays weights out: its transpose lays their gradients back, and in a
    # wide dtype it rounds nothing.
    _, pull = jax.vjp(lambda weights: prepare(weights, call.wide), weights)
    (dweights,) = pull(of.weights)
    if of.cached is not None:
        dold = add_cached(dold, of.cached, cache)
    # Integers have no gradient.
    dold = dold._replace(position=None, written=None)
    return jnp.moveaxis(dx, 0, 1).astype(x.dtype), dweights, dold


def _one_layer(run, x: Array, layer: tuple[Prepared, RecurrentCache]):
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
