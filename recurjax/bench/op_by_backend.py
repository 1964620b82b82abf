"""One op by backend: both passes timed, and its block sizes tuned.

An op's own room gives its calls, and what is tried of each size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import mesh_cut
from pallas_kernels.dispatch import Op
from recurjax.bench.timing import BenchRow, in_turns, repeat, row
from recurjax.bench.tuning import Candidate, Sizes, Tuned, tune_one_by_one
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.sharding import make_mesh

Dtype = Literal["float32", "bfloat16"]
Candidates = Mapping[str, Mapping[str, Sequence[int]]]
"""What is tried of each size, by backend, in the order in which one is settled after
the other."""

PASSES = ("forward", "forward_backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of an op: how it is made, and of what.

    Attributes:
      op: how the op describes itself.
      function: (*arrays, **options) -> outputs; options are those of the op's function
        that a bench sets: `implementation` and sizes.
      arrays: trees; gradients are those of their floating leaves.
      shape: the sizes that stand in its rows, by letter, B and T first.
      shape_class: the class of calls whose best sizes are the same.
      sized: makes options of sizes; of none it makes those that leave all to the
        heuristic, whatever was measured before.
    """

    op: Op
    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    shape: Mapping[str, int]
    shape_class: Mapping[str, Any]
    sized: Callable[[Sizes], dict[str, Any]]

    @property
    def tokens(self) -> int:
        """B T."""
        return self.shape["B"] * self.shape["T"]

    def program(self, what: str, **options: Any) -> Candidate:
        """Compiles a pass; calling it runs it."""
        leaves, tree = jax.tree.flatten(self.arrays)
        floats = [n for n, leaf in enumerate(leaves) if _floats(leaf)]

        def run(floating: list[jax.Array], rest: list[jax.Array]) -> Any:
            return self.function(*_merged(tree, floats, floating, rest), **options)

        def squares(floating: list[jax.Array], rest: list[jax.Array]) -> jax.Array:
            # A plain sum's gradient is the same everywhere: a compiler may use that.
            out = jax.tree.leaves(run(floating, rest))
            return jnp.sum(
                jnp.stack([jnp.sum(x.astype(jnp.float32) ** 2) for x in out])
            )

        function = run if what == "forward" else jax.grad(squares)
        floating = [leaves[n] for n in floats]
        rest = [leaf for leaf in leaves if not _floats(leaf)]
        compiled = jax.jit(function).lower(floating, rest).compile()
        return partial(compiled, floating, rest)

    def backends(self) -> list[str]:
        """Returns those that serve it on this device, as a call prefers them."""
        serving = []
        for name in self.op.backends:
            run = partial(self.function, **self.sized({}), implementation=name)
            try:
                jax.eval_shape(run, *self.arrays)
            except NotImplementedError:
                continue
            serving.append(name)
        return serving


@dataclass(frozen=True, kw_only=True, slots=True)
class OpBench:
    """What the room of an op offers: `rows` and `tune` of its calls.

    Attributes:
      calls: (large, dtype) -> the bench's own.
      calls_of_run: those that one device has in a step of a run; raises UserError where
        no layer of it has the op.
      candidates: what is tried of each size.
    """

    calls: Callable[[bool, Dtype], Iterable[Call]]
    calls_of_run: Callable[[Experiment], Iterable[Call]]
    candidates: Candidates

    def rows(self, *, large: bool, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
        """Measures both passes of every backend that serves a call here."""
        yield from rows(self.calls(large, dtype), dtype=dtype, repeats=repeats)

    def tune(
        self,
        *,
        large: bool,
        dtype: Dtype,
        repeats: int,
        experiment: Experiment | None = None,
    ) -> Iterator[Tuned]:
        """Tries block sizes of the backend that serves each call, and yields the best.

        Args:
          large, dtype: of the bench's calls.
          experiment: tunes what a device of this run has instead, in its own dtype.

        Raises:
          UserError: no layer of the experiment has the op here.
        """
        calls = self.calls(large, dtype)
        if experiment is not None:
            calls = self.calls_of_run(experiment)
        yield from tune(calls, self.candidates, repeats=repeats)


def rows(calls: Iterable[Call], *, dtype: Dtype, repeats: int) -> Iterator[BenchRow]:
    """Measures both passes of every backend that serves a call here."""
    for call in calls:
        for backend in call.backends():
            for what in PASSES:
                # As a program has it: with measured sizes, where a file is set.
                run = call.program(what, implementation=backend)
                name = f"{call.op.name}/{backend}/{what}"
                times = repeat(run, repeats=repeats)
                yield row(name, call.shape, dtype, times, tokens=call.tokens)


def summary(rows: list[BenchRow]) -> str:
    """Names the fastest backend of every shape where there are several."""
    lines = []
    for shape in {tuple(r.shape.items()): r.shape for r in rows}.values():
        both = {
            r.name.split("/")[1]: r.min_ms
            for r in rows
            if r.shape == shape and r.name.endswith("/forward_backward")
        }
        if len(both) > 1:
            ordered = sorted(both, key=lambda name: both[name])
            times = ", ".join(f"{name} {both[name]:,.1f} ms" for name in ordered)
            sizes = ", ".join(f"{letter} {size}" for letter, size in shape.items())
            lines.append(f"{sizes}, both passes: {times}")
    return "\n".join(lines)


def tune(
    calls: Iterable[Call], candidates: Candidates, *, repeats: int
) -> Iterator[Tuned]:
    """Tries block sizes of the backend that serves each call, and yields the best.

    Both passes together are timed, a training step's share; the sizes are settled one
    after the other, the candidates of each in turns with the best so far. Calls of one
    class are tuned once.
    """
    done = []
    for call in calls:
        if call.shape_class in done:
            continue
        done.append(call.shape_class)
        backend = call.backends()[0]
        yield tune_one_by_one(
            op=call.op.name,
            backend=backend,
            shape=call.shape_class,
            candidates=candidates.get(backend, {}),
            make=partial(_candidate, call, backend),
            time=partial(in_turns, repeats=repeats, warmup=1),
        )


def rows_of_step(experiment: Experiment) -> int:
    """Returns the rows that all devices have together in a part of a step."""
    return experiment.training.batch // experiment.training.accumulation


def as_one_device_has_it(op: Op, call: Any, experiment: Experiment) -> Any:
    """Returns the shapes of a run's call as the run's mesh leaves them to one device.

    Args:
      call: shapes of the entire call, as a backend receives them.

    Raises:
      UserError: the run cuts its tokens or layers over devices.
    """
    mesh = make_mesh(experiment.mesh)
    for axis in ("stage", "sequence"):
        if mesh.shape[axis] > 1:
            raise UserError(
                f"tunes rows and layers that lie on one device: set --mesh.{axis} 1"
            )
    parts = []

    def divide(call: Any) -> None:
        cut = op.find_cut(call)
        if cut is not None and cut.cuts:
            specs = op.specs(cut, call, "xla").call
            parts.append(mesh_cut.local_shapes(cut, specs, call))

    # As the op's frame does: nothing is computed.
    with jax.set_mesh(mesh):
        jax.eval_shape(divide, call)
    return parts[0] if parts else call


def drawn(shapes: Any) -> Any:
    """Returns arrays of these shapes: normal numbers, or zeros of another kind."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [
        jax.random.normal(key, leaf.shape, leaf.dtype)
        if _floats(leaf)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def _candidate(call: Call, backend: str, sizes: Sizes) -> Candidate:
    """Compiles both passes with these sizes; {}: with the heuristic's.

    Raises:
      NotImplementedError: the backend cannot have them here.
    """
    options = call.sized(sizes)
    return call.program("forward_backward", implementation=backend, **options)


def _floats(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _merged(
    tree: Any, floats: list[int], floating: list[jax.Array], rest: list[jax.Array]
) -> Any:
    """Puts floating leaves and the others back in their places."""
    others, floating = iter(rest), list(floating)
    count = len(floating) + len(rest)
    own = dict(zip(floats, floating, strict=True))
    leaves = [own[n] if n in own else next(others) for n in range(count)]
    return jax.tree.unflatten(tree, leaves)
