"""What every op promises: one suite, which each op's test file inherits.

    class TestLaws(OpLaws):
        op = api.OP
        function = staticmethod(gated_scan)
        reference = staticmethod(gated_scan_reference)
        ...

Kernels run in Pallas' interpreter, through the op's public function: each backend is
put into the op's own table, so that the frame's dispatch and gradient are tested too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Op
from pallas_kernels.target import Target, as_if
from tests.compiling import QUICK_COMPILE
from tests.tolerances import assert_gradients_close, assert_values_close

SLOW = pytest.mark.slow


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
      arrays: floating ones, by name; gradients are compared for all of them.
      rest: integer arrays and options, by name.
    """

    arrays: dict[str, Any]
    rest: dict[str, Any]


class OracleCase(NamedTuple):
    """A call on which a backend is compared with the reference."""

    backend: str
    length: int
    switches: Mapping[str, Any] = {}
    dtype: str = "float32"

    def slow(self) -> Any:
        """Returns the case as a parameter that only `-m slow` runs."""
        return pytest.param(self, marks=SLOW, id=str(self))

    def sweep(self) -> Any:
        """Returns the case as a parameter that only a sweep runs."""
        return pytest.param(self, marks=pytest.mark.sweep, id=str(self))

    def __str__(self) -> str:
        messages = [f"{name}={value}" for name, value in self.switches.items()]
        return " ".join([self.backend, f"T={self.length}", *messages, self.dtype])


class OpLaws:
    """The suite.

    Attributes:
      op: how the op describes itself.
      function: the op, called with a `Call`'s arguments by name.
      unchecked: the op without a check of its annotations, where `function` only
        calls it.
      reference: its definition, called alike.
      backends: how each kernel runs here: its module, and what interprets it in small
        blocks. "xla" runs as it is. After a backend's name there can be another word:
        the same backend in other blocks.
      oracle_cases: calls that are compared with the reference.
      timed: names of the arrays whose second axis is time.
      rowed: names of the arrays whose first axis is the batch's rows.
      cuts: positions where a call of 13 is cut in two.
    """

    op: Op
    function: Callable[..., Any]
    unchecked: Callable[..., Any] | None = None
    reference: Callable[..., Any]
    backends: Mapping[str, Any]
    oracle_cases: list[Any]
    timed: tuple[str, ...]
    rowed: tuple[str, ...]
    cuts: tuple[int, ...] = (6,)

    def call(self, length: int, *, dtype: str = "float32", **switches: Any) -> Call:
        """Returns a call of `length` positions and at least two rows."""
        raise NotImplementedError

    def meant(self, call: Call, outputs: Any) -> Any:
        """Returns the outputs with zeros where they have no meaning."""
        del call
        return outputs

    def changed_from(self, call: Call, at: int) -> Call:
        """Returns the call with other values at and after position `at`."""
        return _changed(call, self.timed, lambda x: x.at[:, at:].add(0.5))

    def in_two(self, call: Call, at: int, backend: str) -> Any:
        """Returns the full call's outputs from two calls, cut before position `at`."""
        raise NotImplementedError

    def test_values_and_gradients_are_those_of_the_reference(self, oracle_case):
        case = oracle_case
        call = self.call(case.length, dtype=case.dtype, **case.switches)
        got = self.both_passes(call, case.backend)
        want = self.both_passes(_widened(call), None)
        assert_values_close(got[0], want[0], case.dtype)
        assert_gradients_close(got[1], want[1], case.dtype)

    def test_any_cut_with_the_state_carried_over_changes_nothing(self, law_of):
        call = self.call(13)
        (whole,) = self.outputs(law_of, call)
        for at in self.cuts:
            assert_values_close(self.in_two(call, at, law_of), whole)

    def test_the_future_does_not_leak_into_the_past(self, law_of):
        call, at = self.call(13), 8
        before, after = self.by_row(law_of, call, self.changed_from(call, at))
        np.testing.assert_array_equal(after[:, :at], before[:, :at])
        assert np.all(np.any(after[:, at:] != before[:, at:], axis=(0, 2)))

    def test_rows_do_not_mix(self, law_of):
        call = self.call(13)
        changed = _changed(call, self.rowed, lambda x: x.at[1:].add(0.5))
        before, after = self.by_row(law_of, call, changed)
        np.testing.assert_array_equal(after[0], before[0])
        assert np.any(after[1] != before[1])

    def test_a_backend_without_its_device_is_refused_by_name(self):
        call, absent = self.call(13), Target(platform="none", kind="none")
        for backend in self.op.backends:
            if backend != "xla":
                reason = f"{self.op.name}: {backend}: needs an? .*, found none"
                with (
                    as_if(absent),
                    pytest.raises(NotImplementedError, match=reason),
                ):
                    self.named(call, backend)

    def test_an_unknown_backend_is_named(self):
        message = f"{self.op.name}: needs an implementation of .*, got 'cuda'"
        with pytest.raises(ValueError, match=message):
            self.named(self.call(1), "cuda")

    def named(self, call: Call, backend: str | None) -> Any:
        """Calls the op without the tests' check of its annotations."""
        function = self.unchecked or self.function
        unchecked = getattr(function, "__wrapped__", function)
        return unchecked(**call.arrays, **call.rest, implementation=backend)

    def outputs(self, backend: str, *calls: Call) -> list[Any]:
        """Returns the outputs for calls that differ in the arrays' values only."""
        with self.running(backend) as function:
            run = jax.jit(
                lambda arrays: function(**arrays, **calls[0].rest),
                compiler_options=QUICK_COMPILE,
            )
            return [run(call.arrays) for call in calls]

    def by_row(self, backend: str, *calls: Call) -> list[np.ndarray]:
        """Returns the first output of each call, [B, T, all else]."""
        firsts = [jax.tree.leaves(out)[0] for out in self.outputs(backend, *calls)]
        return [np.asarray(x.reshape(*x.shape[:2], -1)) for x in firsts]

    def both_passes(self, call: Call, backend: str | None) -> tuple[Any, Any]:
        """Returns the outputs and the gradients of a fixed random sum of them."""
        with self.running(backend) as function:

            @partial(jax.jit, compiler_options=QUICK_COMPILE)
            @partial(jax.value_and_grad, has_aux=True)
            def run(arrays):
                outputs = self.meant(call, function(**arrays, **call.rest))
                draw = np.random.default_rng(0)
                leaves = jax.tree.leaves(outputs)
                weighted = [jnp.sum(x * _weights(draw, x)) for x in leaves]
                return sum(weighted), tuple(leaves)

            (_, outputs), gradients = run(call.arrays)
        return outputs, gradients

    @contextmanager
    def running(self, backend: str | None) -> Iterator[Callable[..., Any]]:
        """Gives a function that runs the call by the backend, whatever the device."""
        if backend is None:
            yield self.reference
            return
        module, options = self.backends[backend]
        name = backend.split()[0]
        with pytest.MonkeyPatch.context() as patch:
            if options:
                stand_in = SimpleNamespace(
                    supported=module.expressible,
                    forward=_always(module.forward, options),
                    backward=_always(module.backward, options),
                )
                patch.setitem(self.op.backends, name, stand_in)
            yield partial(self.function, implementation=name)


def _always(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Returns a backend's function with options that go before those of the call."""

    def run(call: Any, *rest: Any, **given: Any) -> Any:
        call = call._replace(options=replace(call.options, **options))
        return function(call, *rest, **given)

    return run


def _changed(call: Call, names: tuple[str, ...], change: Callable[..., Any]) -> Call:
    changed = {
        name: jax.tree.map(change, tree) if name in names else tree
        for name, tree in call.arrays.items()
    }
    return call._replace(arrays=changed)


def _weights(draw: np.random.Generator, like: jax.Array) -> np.ndarray:
    return draw.normal(size=like.shape).astype("float32")


def _widened(call: Call) -> Call:
    """Returns the call as the reference computes it: in float32 at least."""

    def wide(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    return call._replace(arrays=jax.tree.map(wide, call.arrays))
