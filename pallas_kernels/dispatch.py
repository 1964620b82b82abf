"""The frame of every op: checks, choice of a backend, mesh, and the gradient.

An op's call is one NamedTuple: its arrays, and `options`, a frozen dataclass of what is
static, registered with `jax.tree_util.register_static`. Floating leaves have a
gradient, the others (lengths, starts of documents) have none. An op describes itself as
an `Op`; its public function builds the call and hands it to `run`. A backend is a
module:

    supported(call) -> why it cannot run the call, or None
    forward(call, *, residuals) -> (outputs, residuals)
    backward(call, residuals, cotangents) -> gradients

`outputs` is the op's own tree, and `cotangents` has its form. `residuals` is what
`backward` reads besides the call; `forward` may leave it out (None) where its argument
`residuals` is False, because nothing is differentiated. Gradients are the call with
each array's gradient in its place, or any tree with the same floating leaves in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import mesh_cut, target
from pallas_kernels.mesh_cut import Cut

Implementation = Literal["triton", "mosaic_tpu", "xla"]
_PLATFORMS: dict[str, Callable[[], str | None]] = {
    "triton": target.refusal_of_triton,
    "mosaic_tpu": target.refusal_of_mosaic_tpu,
    "xla": lambda: None,
}
"""Why each cannot run on the target."""


class Specs(NamedTuple):
    """The sharding of a call over a mesh that cuts it: trees of PartitionSpecs.

    Attributes:
      call: the call with a spec in place of each array; one can stand for a tree.
      outputs, residuals: specs of the outputs and residuals that the backend's
        `forward` returns.
    """

    call: Any
    outputs: Any
    residuals: Any


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Op:
    """The parts of an op that the frame needs.

    Attributes:
      name: as callers know it.
      backends: by name, in order of preference; the last, "xla", can do everything.
        A module, or its name, to be imported where the platform can run it.
      find_cut: (call) -> how the mesh that is set cuts the call, or None.
      specs: (cut, call, backend's name) -> how the parts are sharded over it. Backends
        may lay their residuals out differently.
      reads_outputs: whether `backward` reads the outputs too: its residuals are then
        (outputs, residuals).
      cuts_xla: whether the call is cut for "xla" too. The compiler cuts XLA's own
        operations by itself, but some loops it can only gather for.
      prepare: (call, backend, cut) -> the call that the chosen backend runs; jax
        differentiates through it. None: the call as it is.
      on_device: (cut, options) -> the options of a device's part of the call, for what
        a backend has to do among the devices itself. None: the call's own.
    """

    name: str
    backends: Mapping[str, Any]
    find_cut: Callable[[Any], Cut | None]
    specs: Callable[[Cut, Any, str], Specs]
    reads_outputs: bool = False
    cuts_xla: bool = False
    prepare: Callable[[Any, Any, Cut | None], Any] | None = None
    on_device: Callable[[Cut, Any], Any] | None = None


def backends_in(package: str, *, module: str = "") -> dict[str, Any]:
    """Returns the backends of an op, none of which is imported yet.

    Kernels of absent devices would be 0.15 s of every command.

    Args:
      module: of each backend's own package; "": the backend is a module.
    """
    names = (f"{package}.{name}" for name in get_args(Implementation))
    ends = f".{module}" if module else ""
    return {name.rpartition(".")[2]: name + ends for name in names}


def run(op: Op, call: Any, *, implementation: str | None) -> Any:
    """Runs the first backend that can, or the one that is named; returns its outputs.

    Args:
      implementation: a backend, which then runs or raises; None: the first that can.

    Raises:
      ValueError: no backend has this name.
      NotImplementedError: the named backend cannot run this call here, or none can
        with these options.
    """
    # A backend that was named is the only candidate: it runs or its reason is raised.
    known, reasons = list(op.backends), []
    for name in known if implementation is None else [implementation]:
        if name not in op.backends:
            raise ValueError(
                f"{op.name}: needs an implementation of {known}, got {name!r}"
            )
        choice = _Choice(op, name, _find_cut(op, name, call))
        reason = choice.refusal(call)
        if reason is None:
            if op.prepare is not None:
                call = op.prepare(call, choice.backend, choice.cut)
            return _differentiable(choice, call)
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{op.name}: {'; '.join(reasons)}")


def check_shapes(op: str, expected: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Raises ValueError for the first array with a wrong shape.

    Args:
      wanted: by the argument's name, the array (None: not given) and its shape.
    """
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{op}: needs {name} of shape {shape}, got {array.shape}")


def check_kinds(
    op: str,
    *,
    floating: Mapping[str, Any],
    integers: Mapping[str, Any] = MappingProxyType({}),
    truth: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raises ValueError for the first array that is of another kind than it should be.

    Args:
      floating, whole, truth: by the argument's name, arrays (None: not given) of
        floating numbers, of integers and of bool.
    """
    kinds = (
        ("floating", jnp.floating, floating),
        ("integer", jnp.integer, integers),
        ("bool", jnp.bool_, truth),
    )
    for word, kind, arrays in kinds:
        for name, array in arrays.items():
            if array is not None and not jnp.issubdtype(array.dtype, kind):
                raise ValueError(f"{op}: needs {word} {name}, got {array.dtype}")


def refusal_of_one_position(x: jax.Array) -> str | None:
    """Returns why a scan's kernels leave a decode step [B, 1, ...] alone, or None."""
    if x.shape[1] > 1:
        return None
    return "leaves one position to xla, which fuses it with what surrounds it"


def refusal_of_dtypes(arrays: Mapping[str, jax.Array], *dtypes: Any) -> str | None:
    """Returns which array has none of the dtypes that kernels compute in, or None."""
    for name, array in arrays.items():
        if array.dtype not in dtypes:
            known = " and ".join(jnp.dtype(dtype).name for dtype in dtypes)
            return f"computes in {known}, got {name} of {array.dtype}"
    return None


def _find_cut(op: Op, backend: str, call: Any) -> Cut | None:
    if backend != "xla":
        return op.find_cut(call)
    cut = op.find_cut(call) if op.cuts_xla else None
    return cut if cut is not None and cut.cuts else None


class _Choice(NamedTuple):
    """The backend that runs a call, and how the mesh cuts it."""

    op: Op
    name: str
    cut: Cut | None

    @property
    def backend(self) -> Any:
        backend = self.op.backends[self.name]
        return import_module(backend) if isinstance(backend, str) else backend

    def refusal(self, call: Any) -> str | None:
        """Returns why the backend cannot run the call, each device its part."""
        # What a kernel leaves uncut no one cuts; the compiler cuts the rest of XLA's.
        if self.cut is not None and self.name != "xla" and self.cut.refusal is not None:
            return self.cut.refusal
        if isinstance(self.op.backends[self.name], str):
            reason = _PLATFORMS[self.name]()
            if reason is not None:
                return reason
        if self.cut is None:
            return self.backend.supported(call)
        # The backend sees the shapes that each device has; nothing is computed.
        reasons = []

        def ask(part: Any) -> None:
            reasons.append(self.backend.supported(self._on_device(part)))

        specs = self.op.specs(self.cut, call, self.name)
        jax.eval_shape(ask, mesh_cut.local_shapes(self.cut, specs.call, call))
        return reasons[0]

    def forward(self, call: Any, *, residuals: bool) -> tuple[Any, Any]:
        """Returns (outputs, residuals), the latter None where they are not wanted."""

        def local(part: Any) -> tuple[Any, Any]:
            part = self._on_device(part)
            outputs, saved = self.backend.forward(part, residuals=residuals)
            return outputs, saved if residuals else None

        if self.cut is None:
            return local(call)
        specs = self.op.specs(self.cut, call, self.name)
        results = (specs.outputs, specs.residuals if residuals else None)
        return mesh_cut.run(self.cut, local, (specs.call,), results, call)

    def backward(self, call: Any, residuals: Any, cotangents: Any) -> list[jax.Array]:
        """Returns the gradients of the floating leaves of the call."""

        def gradients(part: Any, residuals: Any, cotangents: Any) -> list[jax.Array]:
            part = self._on_device(part)
            return jax.tree.leaves(self.backend.backward(part, residuals, cotangents))

        cut = self.cut
        if cut is None:  # On one device the backend's gradients are complete.
            return gradients(call, residuals, cotangents)
        specs = self.op.specs(cut, call, self.name)
        leaves = zip(_leaf_specs(specs.call, call), jax.tree.leaves(call), strict=True)
        of_floats = [spec for spec, leaf in leaves if _floats(leaf)]

        def local(*parts: Any) -> list[jax.Array]:
            # Devices that share an array each have a part of its gradient.
            return [
                jax.lax.psum(d, shared) if (shared := _shared_by(cut, spec)) else d
                for d, spec in zip(gradients(*parts), of_floats, strict=True)
            ]

        of_residuals = specs.residuals
        if self.op.reads_outputs:
            of_residuals = (specs.outputs, of_residuals)
        in_specs = (specs.call, of_residuals, specs.outputs)
        arguments = (call, residuals, cotangents)
        return mesh_cut.run(cut, local, in_specs, of_floats, *arguments)

    def _on_device(self, part: Any) -> Any:
        """Returns a device's part of the call with what the op says to a backend."""
        if self.cut is None or self.op.on_device is None:
            return part
        return part._replace(options=self.op.on_device(self.cut, part.options))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(choice: _Choice, call: Any) -> Any:
    return choice.forward(call, residuals=False)[0]


def _forward(choice: _Choice, call: Any) -> tuple[Any, Any]:
    outputs, residuals = choice.forward(call, residuals=True)
    if choice.op.reads_outputs:
        residuals = (outputs, residuals)
    return outputs, (call, residuals)


def _backward(choice: _Choice, saved: Any, cotangents: Any) -> tuple[Any]:
    call, residuals = saved
    gradients = choice.backward(call, residuals, cotangents)
    leaves, tree = jax.tree.flatten(call)
    # One too many would give another array's gradient to those after it.
    if len(gradients) != sum(map(_floats, leaves)):
        raise TypeError(
            f"{choice.op.name}: {choice.name} gave {len(gradients)} gradients for "
            f"{sum(map(_floats, leaves))} floating arrays"
        )
    rest = iter(gradients)
    # Integers have no gradient: jax wants a zero of a type of its own for them.
    of_leaves = [
        next(rest).astype(leaf.dtype)
        if _floats(leaf)
        else np.zeros(leaf.shape, jax.dtypes.float0)
        for leaf in leaves
    ]
    return (jax.tree.unflatten(tree, of_leaves),)


_differentiable.defvjp(_forward, _backward)


def _floats(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _leaf_specs(specs: Any, arrays: Any) -> list[P]:
    """Returns one spec for each leaf of the arrays."""
    spread = mesh_cut.with_specs(lambda spec, _: spec, specs, arrays)
    return jax.tree.leaves(spread, is_leaf=lambda leaf: isinstance(leaf, P))


def _shared_by(cut: Cut, spec: P) -> tuple[str, ...]:
    """Returns the axes that cut the call and not the array with this spec."""
    of_array = {
        axis
        for names in spec
        for axis in ((names,) if isinstance(names, str) else names or ())
    }
    axes = (*cut.rows, cut.columns)
    return tuple(axis for axis in axes if axis is not None and axis not in of_array)
