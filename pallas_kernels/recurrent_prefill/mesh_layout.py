"""The op on a mesh: rows and layers are cut by `shard_map`, a backend sees its own.

Left to the compiler, the weights' gradients would be summed over the devices once a
tile, and no kernel would be cut at all. Here the devices meet once a call, and stages
of a wavefront once a tile (`xla/geometry.py`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from pallas_kernels import mesh_cut
from pallas_kernels.mesh_cut import Cut, free_axes, row_axes
from pallas_kernels.recurrent_prefill.arrays import (
    Array,
    LayerWeights,
    RecurrentCache,
    Residuals,
    Rows,
)

LAYER_AXIS = "stage"
"""The axis of the mesh that cuts the layers, where it has it."""


class Stages(NamedTuple):
    """Devices that the layers lie on, and their mesh axis."""

    count: int
    axis: str | None


ONE_STAGE = Stages(1, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshLayout:
    """How one call lies on a mesh.

    Attributes:
      cut: its mesh and the axes that cut it; in the place of columns stands the axis
        that cuts the layers.
      stages: devices that the layers are cut over.
    """

    cut: Cut
    stages: Stages


def layout_of_call(
    x: Float[Array, "B T D"], weights: LayerWeights, *, schedule: str | None
) -> MeshLayout | None:
    """Returns the layout on the mesh that `jax.set_mesh` set; None: nothing is cut.

    A batch that the devices do not divide is computed whole on each of them.

    Raises:
      ValueError: several stages, and no wavefront or layers that they do not divide.
    """
    rows, free = row_axes(x.shape[0]), free_axes()
    stages = free.get(LAYER_AXIS, 1)
    if stages > 1:
        _check_stages(stages, weights.w_q.shape[0], schedule)
    if not rows and stages == 1:
        return None
    axis = LAYER_AXIS if stages > 1 else None
    left = tuple(name for name in free if name not in (*rows, axis))
    mesh = jax.sharding.get_abstract_mesh()
    cut = Cut(mesh=mesh, rows=rows, columns=axis, left=left)
    return MeshLayout(cut=cut, stages=Stages(stages, axis))


def left_to_the_compiler(layout: MeshLayout | None) -> str | None:
    """Returns why no kernel can run: an axis that cuts neither rows nor layers."""
    left = tuple(free_axes()) if layout is None else layout.cut.left
    if not left:
        return None
    return f"the mesh's {' and '.join(left)} cuts neither rows nor layers of the call"


def refusal_on_mesh(
    backend: Any, layout: MeshLayout, *arguments: Any, options: dict[str, Any]
) -> str | None:
    """Returns why a backend cannot run each device's part, None when it can.

    Args:
      arguments: x, weights, cache and rows of the whole call.
    """
    if layout.stages.count > 1 and not backend.RUNS_ON_STAGES:
        return "runs no layers on several stages"
    reasons = []

    def ask(*arguments: Any) -> None:
        reasons.append(backend.supported(*arguments, **options))

    jax.eval_shape(ask, *mesh_cut.local_shapes(layout.cut, _specs(layout), arguments))
    return reasons[0]


def run_forward(
    backend: Any,
    layout: MeshLayout,
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    rows: Rows,
    *,
    residuals: bool,
    options: dict[str, Any],
) -> tuple[Array, RecurrentCache, Residuals | None]:
    """Runs a backend's forward on each device's rows and layers."""
    x_spec, weights_spec, cache_spec, rows_spec = _specs(layout)
    forward = partial(backend.forward, residuals=residuals, **options)
    kept = _kept(backend, layout) if residuals else None
    return mesh_cut.run(
        layout.cut,
        forward,
        (x_spec, weights_spec, cache_spec, rows_spec),
        (x_spec, cache_spec, kept),
        *(x, weights, cache, rows),
    )


def run_backward(
    backend: Any,
    layout: MeshLayout,
    *arguments: Any,
    options: dict[str, Any],
) -> tuple[Array, LayerWeights, RecurrentCache]:
    """Runs a backend's backward likewise; weights' gradients are summed at its end.

    Args:
      arguments: those of a backend's `backward`, in order.
    """
    x_spec, weights_spec, cache_spec, rows_spec = _specs(layout)

    def backward(*arguments):
        dx, dweights, dcache = backend.backward(*arguments, **options)
        if layout.cut.rows:
            dweights = jax.lax.psum(dweights, layout.cut.rows)
        return dx, dweights, dcache

    specs = (x_spec, weights_spec, cache_spec, rows_spec)
    kept = _kept(backend, layout)
    return mesh_cut.run(
        layout.cut,
        backward,
        (*specs, kept, x_spec, cache_spec),
        (x_spec, weights_spec, cache_spec),
        *arguments,
    )


def _specs(layout: MeshLayout) -> tuple[P, P, RecurrentCache, P]:
    """Returns the specs of x, weights, cache and rows."""
    rows, layers = layout.cut.by_row, layout.stages.axis
    pairs: Any = P(layers, rows)
    by_row: Any = P(rows)
    cache = RecurrentCache(pairs, pairs, pairs, pairs, position=by_row)
    return by_row, P(layers), cache, by_row


def _kept(backend: Any, layout: MeshLayout) -> P:
    """Returns the spec of the residuals, whose axis of rows is the backend's own."""
    between = (None,) * (backend.ROWS_AXIS - 1)
    return P(layout.stages.axis, *between, layout.cut.by_row)


def _check_stages(stages: int, layers: int, schedule: str | None) -> None:
    if schedule != "wavefront":
        raise ValueError(
            'recurrent_prefill: wants schedule "wavefront" on a mesh of '
            f"{stages} stages, got {schedule!r}"
        )
    if layers % stages:
        raise ValueError(
            "recurrent_prefill: wants a number of layers that the mesh's stages "
            f"divide, got {layers} layers on {stages} stages"
        )
