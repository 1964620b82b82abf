"""Meshes, and the shardings of everything: parameters by their table's rules."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from recurjax.errors import UserError
from recurjax.machine import host
from recurjax.machine.devices import is_flat_slice
from recurjax.parameters import find_rule, parameter_name
from recurjax.ranges import Range, check_ranges
from recurjax.types import Batch

AXES = ("data", "fsdp", "stage", "sequence", "tensor")
"""data: batch; fsdp: batch and parameters; stage: layers (the Recurrent Transformer's
wavefront); sequence: the tokens of a row (RAT's stacks); tensor: heads, feed-forward
width, vocabulary."""

_AxisSize = Annotated[int, Range(least=-1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Shape of the device mesh.

    One axis may be -1 and takes all remaining devices.

    Attributes:
      data: data parallelism: number of model replicas, each with its own rows; -1: all
        remaining devices.
      fsdp: fully sharded data parallelism: devices that shard the parameters of a
        replica, each with its own rows.
      stage: pipeline parallelism: devices that share the layers; above 1 only for a
        Recurrent Transformer with the schedule "wavefront".
      sequence: sequence parallelism: devices that share the tokens of every row; above
        1 only for RAT stacks. Each holds all parameters of its place on the other axes.
      tensor: tensor parallelism: devices that share the matrix products of every layer.
    """

    data: _AxisSize = -1
    fsdp: _AxisSize = 1
    stage: _AxisSize = 1
    sequence: _AxisSize = 1
    tensor: _AxisSize = 1

    def __post_init__(self):
        check_ranges(self)
        sizes = tuple(getattr(self, axis) for axis in AXES)
        if 0 in sizes or sizes.count(-1) > 1:
            raise ValueError(
                "MeshConfig: axes must be at least 1, and one of them may be -1, "
                f"got {sizes}"
            )

    @property
    def least_devices(self) -> int:
        """The fewest devices that it needs; an axis of -1 counts as one."""
        return math.prod(max(getattr(self, axis), 1) for axis in AXES)


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Lays the devices out; `tensor` varies fastest, so it stays within a host.

    Several TPU slices are joined by a network much slower than the links inside each:
    only `data`, whose devices exchange gradients once per step, spans them.

    Raises:
      UserError: the axes' sizes do not multiply to the number of devices, or `data` is
        not a multiple of the slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    # The sizes that are given; what is left over goes to the axis of -1.
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if -1 in sizes and len(devices) % fixed == 0:
        sizes[sizes.index(-1)] = len(devices) // fixed
    if int(np.prod(sizes)) != len(devices):
        shape = ", ".join(
            f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True)
        )
        *names, last = (f"--mesh.{axis}" for axis in AXES)
        raise UserError(
            f"the mesh ({shape}) does not fit {len(devices)} devices: set "
            f"{', '.join(names)} and {last} so that their product is "
            f"{len(devices)}"
        )
    kinds = (AxisType.Auto,) * len(AXES)
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) > 1:  # which `jax.make_mesh` refuses
        laid = _over_slices(sizes, len(slices), devices)
        return Mesh(laid, AXES, axis_types=kinds)
    return jax.make_mesh(tuple(sizes), AXES, axis_types=kinds, devices=devices)


def _over_slices(sizes: list[int], slices: int, devices: list[Any]) -> np.ndarray:
    if devices[0].platform != "tpu":
        # Of GPUs every host is a "slice"; their network carries any axis.
        return np.asarray(devices, dtype=object).reshape(sizes)
    if sizes[0] % slices:
        raise UserError(
            f"mesh.data {sizes[0]} must be a multiple of the {slices} TPU "
            "slices, because only data spans slices"
        )
    # Within a slice the mesh is laid out as for one slice; `data`, the first axis, then
    # counts slices outermost.
    within = (sizes[0] // slices, *sizes[1:])
    across = (slices,) + (1,) * (len(AXES) - 1)
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=is_flat_slice(devices[0])
    )


def reading_mesh(config: MeshConfig) -> Mesh:
    """Lays out what a trained model is read on: as few devices as the axes need.

    Those are the first ones; an axis of -1 takes all that are left, and several
    processes take part with all devices of each. A CPU that nothing has run on yet
    counts as many as are needed.

    Raises:
      UserError: there are fewer devices, or several processes have others.
    """
    host.start_cpu_devices(config.least_devices)
    devices = jax.devices()
    sizes = [getattr(config, axis) for axis in AXES]
    if -1 not in sizes and jax.process_count() == 1:
        devices = devices[: int(np.prod(sizes))]
    return make_mesh(config, devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [B, T] data: rows over data and fsdp, T over sequence."""
    return NamedSharding(mesh, P(("data", "fsdp"), "sequence"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of replicated arrays."""
    return NamedSharding(mesh, P())


def laid_out(x: Any, where: NamedSharding) -> jax.Array:
    """Puts an array that every process holds alike on the devices of all.

    `jax.device_put` takes no array of one process' device to those of several.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = laid_out(jax.random.key_data(x), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, where, lambda at: array[at])


def check_batch(rows: int, mesh: Mesh, *, name: str) -> None:
    """Raises UserError when `rows`, the option `name`, cannot be spread over a mesh."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % shards:
        raise UserError(
            f"a batch of {rows} rows does not divide over data * fsdp = "
            f"{shards} devices: make {name} a multiple of {shards}"
        )


def local_rows(rows: int, mesh: Mesh) -> tuple[int, int]:
    """Returns the half-open range of a batch's rows that hold all of this process'."""
    sharding = batch_sharding(mesh)
    # Any multiple of the parts would do: only the range of the first axis is read.
    shape = (rows, mesh.shape["sequence"])
    spans = [
        index[0].indices(rows)[:2]
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    ]
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns a NamedSharding for every leaf of a module, gradient or optimizer state.

    A rule's spec names every axis of one layer's parameter; of the axes of stacked
    layers before them the first is sharded over `stage`. Where an axis of the mesh does
    not divide a dimension (8 key heads over 16 devices), that dimension is replicated.
    Leaves that no rule names (counters, past losses) are replicated; that every
    parameter meets a rule is a matter of a test.
    """

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        rule = find_rule(parameter_name(path))
        spec = P() if rule is None else _fit(rule.spec, leaf.shape, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def _fit(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    # Stacked layers have their axes in front of what the rule names.
    leading = len(shape) - len(spec)
    if leading < 0:  # a factored or scalar statistic of the parameter
        return P()
    layers: list[str | None] = [None] * leading
    if leading and mesh.shape["stage"] > 1:
        layers[0] = "stage"
    axes = layers + list(spec)
    divides = [
        # Replicate a dimension that does not divide: correct, and only larger.
        axis if axis is not None and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return P(*divides)


def place(rows: Mapping[str, np.ndarray], mesh: Mesh, *, batch: int) -> Batch:
    """Puts one batch on the devices.

    Args:
      rows: [B, T] arrays of `local_rows`: a process' devices may need only some, where
        the mesh follows the links of a TPU pod.
      mesh: where to.
      batch: rows over all processes.
    """
    sharding = batch_sharding(mesh)
    first, _ = local_rows(batch, mesh)

    def array(name: str) -> jax.Array:
        local = rows[name]

        # jax asks for the part of each of this process' devices: rows are numbered over
        # all processes, and this one holds them from `first` on.
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch)
            return local[start - first : stop - first, index[1]]

        return jax.make_array_from_callback((batch, *local.shape[1:]), sharding, part)

    # Segments only where documents are separate.
    segments = array("segments") if "segments" in rows else None
    return Batch(array("ids"), array("targets"), segments)


def placed(
    loader: Iterable[Mapping[str, np.ndarray]], mesh: Mesh, *, batch: int
) -> Iterator[Batch]:
    """Puts every batch of a loader on the devices."""
    return (place(rows, mesh, batch=batch) for rows in loader)
