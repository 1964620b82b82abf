"""Kernels on a mesh: a call is cut by rows and by columns, each device runs its part.

The compiler cannot cut a kernel: it rejects Mosaic's kernels and runs all of a Triton
kernel on every device. So an op whose rows and columns (channels or heads) do not mix
is cut here by `shard_map`, over the mesh that is set around the call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

ROW_AXES, COLUMN_AXIS = ("data", "fsdp"), "tensor"
"""Axes of the mesh that cut the batch and the columns, where it has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The sharding of one call over a mesh.

    Attributes:
      mesh: the mesh that is set around the call.
      rows: axes that cut the batch.
      columns: the axis that cuts channels or heads, or None.
      left: axes that cut neither: with any, no kernel can run.
    """

    mesh: AbstractMesh
    rows: tuple[str, ...]
    columns: str | None
    left: tuple[str, ...]

    @property
    def by_row(self) -> tuple[str, ...] | None:
        """The entry of a PartitionSpec for an axis of B rows."""
        return self.rows or None

    @property
    def cuts(self) -> bool:
        """Whether any axis cuts the call."""
        return bool(self.rows or self.columns)

    @property
    def refusal(self) -> str | None:
        """Why no kernel can run, None when one can."""
        if not self.left:
            return None
        axes = " and ".join(self.left)
        return f"the mesh's {axes} does not divide the call, which kernels need"


def free_axes() -> dict[str, int]:
    """Returns the sizes of the mesh's axes that cut something around this call.

    The mesh is the one that `jax.set_mesh` has set; axes that `shard_map` has cut
    already do not count, so that code inside it sees unsharded arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    described = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {
        name: size
        for name, size, kind in described
        if kind == AxisType.Auto and size > 1
    }


def row_axes(rows: int) -> tuple[str, ...]:
    """Returns the axes that shard `rows` rows; none if they do not divide them."""
    free = free_axes()
    axes = tuple(axis for axis in ROW_AXES if axis in free)
    # All or none: rows cut by some of the axes would not be the batch's own cut.
    return () if rows % math.prod(free[axis] for axis in axes) else axes


def find_cut(
    rows: int, columns_divide: Callable[[int], bool], *, axis: str = COLUMN_AXIS
) -> Cut | None:
    """Returns how to cut a call on the mesh that is set; None: nothing cuts anything.

    Args:
      rows: B.
      columns_divide: whether a number of devices can share the columns.
      axis: the one that cuts the columns, where the mesh has it.
    """
    mesh, free = jax.sharding.get_abstract_mesh(), free_axes()
    if not free:
        return None
    by_row = row_axes(rows)
    columns = axis if axis in free and columns_divide(free[axis]) else None
    # Axes that shard nothing of this call; the compiler cannot shard a kernel by them.
    left = tuple(axis for axis in free if axis not in (*by_row, columns))
    return Cut(mesh=mesh, rows=by_row, columns=columns, left=left)


def run(
    cut: Cut, function: Callable[..., Any], in_specs: Any, out_specs: Any, *arrays: Any
) -> Any:
    """Runs `function(*parts)` on every device's part."""
    # Only these axes become manual; an axis that the caller's code is cut by stays as
    # it is.
    ours = {*cut.rows, cut.columns} - {None}
    ours |= {axis for axis in cut.mesh.axis_names if cut.mesh.shape[axis] == 1}
    return jax.shard_map(
        function,
        mesh=cut.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=ours,
        check_vma=False,
    )(*arrays)


def as_it_lies(
    array: jax.Array, *, rows: int, columns: tuple[int, ...] = ()
) -> jax.Array:
    """Keeps XLA from turning an array to another layout that one reader prefers.

    The compiler cannot cut such a constraint either: it would gather all of a sharded
    array on every device. Here each device constrains its own part.

    Args:
      array: on a mesh cut by its rows and, where there is `tensor`, by a column axis.
      rows: which axis has the B rows.
      columns: axes that `tensor` may cut; the first that it divides is taken.

    Returns:
      The array; as it came where the mesh does not divide it.
    """

    def constrain(part: jax.Array) -> jax.Array:
        return with_layout_constraint(part, Layout(tuple(range(part.ndim))))

    def cut_by(shards: int) -> int | None:
        return next((c for c in columns if array.shape[c] % shards == 0), None)

    cut = find_cut(array.shape[rows], lambda shards: cut_by(shards) is not None)
    if cut is None:
        return constrain(array)
    if not cut.cuts or COLUMN_AXIS in cut.left:
        return array
    spec: list[Any] = [None] * array.ndim
    spec[rows] = cut.by_row
    if cut.columns is not None:
        column = cut_by(cut.mesh.shape[cut.columns])
        assert column is not None
        spec[column] = cut.columns
    return run(cut, constrain, P(*spec), P(*spec), array)


def local_shapes(cut: Cut, in_specs: Any, arrays: Any) -> Any:
    """Returns the arrays as one device sees them, as shapes."""

    def part(spec: P, leaf: Any) -> jax.ShapeDtypeStruct:
        # A dimension that several axes cut is divided by each of them.
        sizes = list(leaf.shape)
        for axis, names in enumerate(spec):
            for name in (names,) if isinstance(names, str) else names or ():
                sizes[axis] //= cut.mesh.shape[name]
        return jax.ShapeDtypeStruct(sizes, leaf.dtype)

    return with_specs(part, in_specs, arrays)


def with_specs(function: Callable[[P, Any], Any], specs: Any, arrays: Any) -> Any:
    """Returns `function(spec, leaf)` of each leaf; a spec may apply to an entire tree.

    An array that is not given is None, and so is its spec: no leaf in the end.
    """

    def below(spec: Any, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: function(spec, leaf), tree)

    return jax.tree.map(below, specs, arrays)
