"""What every op does alike: shapes checked, a backend chosen, calls cut, a gradient.

An op describes itself as an `Op` and its public function calls `run`. There its arrays
are a tuple of pytrees in the order of the backends' arguments: floating leaves have a
gradient, the others (lengths, starts of documents) have none. A backend is a module:

    supported(*arrays, **options) -> why it cannot run the call, or None
    forward(*arrays, **options) -> a tuple of results
    backward(*arrays, *kept, *cotangents, **options) -> gradients of the floating leaves

`kept` are those results of `forward` that the op names, `cotangents` the gradients of
its outputs. Gradients may be any tree whose leaves are in the order of the arrays'.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import mesh_cut
from pallas_kernels.mesh_cut import Cut

Implementation = Literal["triton", "mosaic_tpu", "xla"]


class Specs(NamedTuple):
    """How arrays lie on a mesh that cuts a call: trees of PartitionSpecs.

    Attributes:
      arrays: of the op's arrays; one spec can stand for a whole tree.
      results: of what the backends' `forward` returns.
    """

    arrays: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Op:
    """What the frame must know of an op.

    Attributes:
      name: as callers know it.
      backends: by name, in order of preference, up to "xla", which can do everything:
        those behind it run only when they are named.
      find_cut: (*arrays) -> how the mesh that is set cuts the call, or None.
      specs: (cut, *arrays) -> how the parts lie on it.
      outputs: how many of the results are the caller's, from the first.
      kept: the results that the gradient reads, by number.
      spares: whether `forward` takes `residuals`, and leaves the results after the
        outputs out (None) where it is False: where nothing is differentiated.
      cuts_xla: whether the call is cut for "xla" too. The compiler cuts XLA's own
        operations by itself, but some loops it can only gather for.
      kept_specs: (backend's name, cut) -> how the results after the outputs lie, where
        backends lay them out differently: it then stands in for those of `specs`.
      on_mesh: (cut) -> options that a backend gets besides the caller's where the call
        is cut, for what it has to do among the devices itself.
    """

    name: str
    backends: Mapping[str, Any]
    find_cut: Callable[..., Cut | None]
    specs: Callable[..., Specs]
    outputs: int
    kept: tuple[int, ...]
    spares: bool = False
    cuts_xla: bool = False
    kept_specs: Callable[[str, Cut], tuple[Any, ...]] | None = None
    on_mesh: Callable[[Cut], dict[str, Any]] | None = None


def run(
    op: Op, arrays: tuple[Any, ...], *, implementation: str | None, **options: Any
) -> tuple[Any, ...]:
    """Runs the first backend that can, or the one that is named; returns its outputs.

    Args:
      implementation: a backend, which then runs or raises; None: the first that can.
      options: static ones, passed on to the backend.

    Raises:
      ValueError: no backend has this name.
      NotImplementedError: the named backend cannot run this call here, or none can
        with these options.
    """
    # A backend that was named is the only one asked: it runs or its reason is raised.
    names = list(op.backends) if implementation is None else [implementation]
    reasons = []
    for name in names:
        if name not in op.backends:
            raise ValueError(
                f"{op.name}: wants an implementation of {list(op.backends)}, got "
                f"{name!r}"
            )
        call = _Call(op, name, _cut(op, name, arrays), tuple(options.items()))
        reason = call.refusal(arrays)
        if reason is None:
            return _differentiable(call, arrays)
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{op.name}: {'; '.join(reasons)}")


def check_shapes(op: str, wanted: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Raises ValueError for the first array that has another shape than it should.

    Args:
      wanted: by the argument's name, the array (None: not given) and its shape.
    """
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{op}: wants {name} of shape {shape}, got {array.shape}")


def check_kinds(
    op: str,
    *,
    floating: Mapping[str, Any],
    whole: Mapping[str, Any] = MappingProxyType({}),
    truth: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raises ValueError for the first array that is of another kind than it should be.

    Args:
      floating, whole, truth: by the argument's name, arrays (None: not given) of
        floating numbers, of integers and of bool.
    """
    kinds = (
        ("floating", jnp.floating, floating),
        ("integer", jnp.integer, whole),
        ("bool", jnp.bool_, truth),
    )
    for word, kind, arrays in kinds:
        for name, array in arrays.items():
            if array is not None and not jnp.issubdtype(array.dtype, kind):
                raise ValueError(f"{op}: wants {word} {name}, got {array.dtype}")


def refusal_of_one_position(x: jax.Array) -> str | None:
    """Returns why a scan's kernels leave a decode step [B, 1, ...] alone, or None."""
    if x.shape[1] > 1:
        return None
    return "leaves one position to xla, which fuses it with what stands around it"


def refusal_of_dtypes(arrays: Mapping[str, jax.Array], *dtypes: Any) -> str | None:
    """Returns which array has none of the dtypes that kernels compute in, or None."""
    for name, array in arrays.items():
        if array.dtype not in dtypes:
            known = " and ".join(jnp.dtype(dtype).name for dtype in dtypes)
            return f"computes in {known}, got {name} of {array.dtype}"
    return None


def _cut(op: Op, backend: str, arrays: tuple[Any, ...]) -> Cut | None:
    if backend != "xla":
        return op.find_cut(*arrays)
    cut = op.find_cut(*arrays) if op.cuts_xla else None
    return cut if cut is not None and cut.cuts else None


class _Call(NamedTuple):
    """What is static of a call."""

    op: Op
    name: str
    cut: Cut | None
    options: tuple[tuple[str, Any], ...]

    @property
    def backend(self) -> Any:
        return self.op.backends[self.name]

    @property
    def all_options(self) -> dict[str, Any]:
        """The caller's, and what the op adds for a call that is cut."""
        options = dict(self.options)
        if self.cut is None or self.op.on_mesh is None:
            return options
        return options | self.op.on_mesh(self.cut)

    def specs(self, arrays: tuple[Any, ...]) -> Specs:
        """Returns how arrays and this backend's results lie on the mesh."""
        op, cut = self.op, self.cut
        assert cut is not None
        specs = op.specs(cut, *arrays)
        if op.kept_specs is None:
            return specs
        kept = op.kept_specs(self.name, cut)
        return specs._replace(results=(*specs.results[: op.outputs], *kept))

    def refusal(self, arrays: tuple[Any, ...]) -> str | None:
        """Returns why the backend cannot run the call, each device its part."""
        supported = partial(self.backend.supported, **self.all_options)
        if self.cut is None:
            return supported(*arrays)
        # What a kernel leaves uncut no one cuts; the compiler cuts the rest of XLA's.
        if self.name != "xla" and self.cut.refusal is not None:
            return self.cut.refusal
        # A backend is asked about the shapes that each device sees; nothing is
        # computed.
        reasons = []

        def ask(*parts: Any) -> None:
            reasons.append(supported(*parts))

        specs = self.specs(arrays).arrays
        jax.eval_shape(ask, *mesh_cut.local_shapes(self.cut, specs, arrays))
        return reasons[0]

    def forward(self, arrays: tuple[Any, ...], *, residuals: bool) -> tuple[Any, ...]:
        """Returns the backend's results."""
        spared = {"residuals": residuals} if self.op.spares else {}
        function = partial(self.backend.forward, **self.all_options, **spared)
        if self.cut is None:
            return function(*arrays)
        specs = self.specs(arrays)
        results = specs.results
        if self.op.spares and not residuals:
            # `forward` leaves these results out, and so do their specs.
            given = self.op.outputs
            results = (*results[:given], *[None] * len(results[given:]))
        return mesh_cut.run(self.cut, function, specs.arrays, results, *arrays)

    def backward(
        self, arrays: tuple[Any, ...], kept: tuple[Any, ...], cotangents: Any
    ) -> list[jax.Array]:
        """Returns the gradients of the floating leaves of `arrays`."""
        # On one device the backend's gradients are whole.
        function = partial(self.backend.backward, **self.all_options)
        if self.cut is None:
            return jax.tree.leaves(function(*arrays, *kept, *cotangents))
        op, cut = self.op, self.cut
        specs = self.specs(arrays)
        of_floats = [
            spec
            for spec, leaf in zip(
                _leaf_specs(specs.arrays, arrays), jax.tree.leaves(arrays), strict=True
            )
            if _floats(leaf)
        ]

        def local(*parts: Any) -> list[jax.Array]:
            gradients = jax.tree.leaves(function(*parts))
            # Devices that share an array each have a part of its gradient.
            return [
                jax.lax.psum(d, shared) if (shared := _shared_by(cut, spec)) else d
                for d, spec in zip(gradients, of_floats, strict=True)
            ]

        in_specs = (
            *specs.arrays,
            *(specs.results[n] for n in op.kept),
            *specs.results[: op.outputs],
        )
        return mesh_cut.run(
            *(cut, local, in_specs, of_floats), *arrays, *kept, *cotangents
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return call.forward(arrays, residuals=False)[: call.op.outputs]


def _forward(call: _Call, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    results = call.forward(arrays, residuals=True)
    kept = tuple(results[n] for n in call.op.kept)
    return results[: call.op.outputs], (arrays, kept)


def _backward(call: _Call, saved: Any, cotangents: Any) -> tuple[Any]:
    arrays, kept = saved
    found = call.backward(arrays, kept, cotangents)
    leaves, tree = jax.tree.flatten(arrays)
    # One too many would give another array's gradient to those behind it.
    if len(found) != sum(map(_floats, leaves)):
        raise TypeError(
            f"{call.op.name}: {call.name} gave {len(found)} gradients for "
            f"{sum(map(_floats, leaves))} floating arrays"
        )
    gradients = iter(found)
    # Integers have no gradient: jax wants a zero of a type of its own for them.
    of_leaves = [
        next(gradients).astype(leaf.dtype)
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
    return jax.tree.leaves(spread, is_leaf=lambda one: isinstance(one, P))


def _shared_by(cut: Cut, spec: P) -> tuple[str, ...]:
    """Returns the axes that cut the call and not the array with this spec."""
    own = {
        axis
        for names in spec
        for axis in ((names,) if isinstance(names, str) else names or ())
    }
    axes = (*cut.rows, cut.columns)
    return tuple(axis for axis in axes if axis is not None and axis not in own)
