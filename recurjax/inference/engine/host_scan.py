"""Programs whose loops over layers the host runs, one compiled layer at a time.

In a loop over stacked layers, XLA for CPUs copies each layer's weights out of their
stack before it multiplies by them: half of the time of a decode step. `HostScan` takes
a traced function apart at its scans over weights. A scan's body is compiled once, and
the host calls it for every layer with views of that layer's weights, so that no weight
is copied. What is between the scans is compiled as it is.

The scans and while loops around such a scan run on the host too. Neither the function
nor the stacks know of this.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

_VIEWS = {
    "reshape": lambda x, params: x.reshape(params["new_sizes"]),
    "squeeze": lambda x, params: x.squeeze(params["dimensions"]),
    "bitcast_convert_type": lambda x, params: x.view(params["new_dtype"]),
}
"""Operations on weights that copy nothing, as numpy does them."""


class _Known(NamedTuple):
    """A value that is the same in every call; jax's array or a view of numpy's."""

    array: Any
    weight: bool


_Value = int | _Known
"""What a variable has: the number of a register, or a known value."""


@dataclass(kw_only=True, slots=True)
class _Step:
    """A call of a compiled program, or a loop of such calls.

    Attributes:
      arguments: with None in the places of registers.
      inputs: the place and the register of each of those.
      outputs: registers of the results.
      donated: places whose arrays the program may overwrite.
      last: registers that no later step reads.
    """

    program: Callable[..., Sequence[Any]]
    arguments: list[Any]
    inputs: dict[int, int]
    outputs: list[int]
    donated: tuple[int, ...] = ()
    last: list[int] = field(default_factory=list)


class HostScan:
    """A traced function, compiled in pieces that the host calls one after another.

    Attributes:
      out_info: shapes and dtypes of the results.
    """

    def __init__(
        self,
        traced: Any,
        arguments: Sequence[Any],
        *,
        known: int,
        donate: Sequence[int],
    ):
        """Compiles the pieces.

        Args:
          traced: what `jax.jit(function).trace` returns.
          arguments: those of the function, arrays where they are known.
          known: how many of the first arguments are the same in every call.
          donate: which arguments a call may overwrite.
        """
        self.out_info, self._known = traced.out_info, known
        tape, inputs, registers_in = _Tape(), [], []
        for number, argument in enumerate(arguments):
            leaves = jax.tree.leaves(argument)
            if number < known:
                inputs += [_Known(leaf, True) for leaf in leaves]
                continue
            registers = [tape.register(stays=number not in donate) for _ in leaves]
            inputs, registers_in = inputs + registers, registers_in + registers
        self._registers = registers_in
        self._results = tape.separate(tape.add(traced.jaxpr, inputs))
        tape.finish(self._results)
        self._tape = tape

    @property
    def programs(self) -> list[jax.stages.Compiled]:
        """The compiled pieces of the function."""
        pieces = dict.fromkeys(self._tape.programs)
        return [x for x in pieces if isinstance(x, jax.stages.Compiled)]

    def __call__(self, *arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments[self._known :])
        results = self._tape.run(self._registers, leaves, self._results)
        return jax.tree.unflatten(jax.tree.structure(self.out_info), results)


def scans_weights(traced: Any, arguments: Sequence[Any], *, known: int) -> bool:
    """Returns whether a traced function scans over its known arguments."""
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    first = sum(counts[:known])
    flags = [n < first for n in range(sum(counts))]
    return _scans_weights(traced.jaxpr.jaxpr, flags)


class _Tape:
    """Steps in order, which read and write registers."""

    def __init__(self):
        self._steps: list[_Step] = []
        self._registers = 0
        self._kept: set[int] = set()
        self._loops: list[_Tape] = []

    @property
    def programs(self) -> list[Any]:
        """The compiled programs of all steps, those of loops included."""
        nested = [program for loop in self._loops for program in loop.programs]
        return [step.program for step in self._steps] + nested

    def register(self, *, stays: bool = False) -> int:
        """Returns the number of a new register.

        Args:
          kept: whether no step may overwrite its array.
        """
        number = self._registers
        self._registers += 1
        if stays:
            self._kept.add(number)
        return number

    def add(self, closed: ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """Appends the steps of a function, and returns what its results have.

        Its inputs are donated where nothing in it reads them later; `finish` copies
        those that something else still needs.
        """
        jaxpr = closed.jaxpr
        values: dict[Var, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            values[var] = _Known(constant, False)
        last_uses = _last_uses(jaxpr)
        waiting: list[JaxprEqn] = []

        def read(atom: Any) -> _Value | None:
            if isinstance(atom, Literal):
                return _Known(np.asarray(atom.val, _shape(atom).dtype), False)
            return values.get(atom)  # None: of an operation that waits

        def flush(end: int) -> None:
            if waiting:
                self._add_program(jaxpr, tuple(waiting), values, last_uses, end)
                waiting.clear()

        for at, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            weights = [isinstance(x, _Known) and x.weight for x in operands]
            if weights and all(weights) and _is_view(eqn):
                results = _view(eqn, [x.array for x in operands])  # pyright: ignore
                known = [_Known(array, True) for array in results]
                values.update(zip(eqn.outvars, known, strict=True))
            elif _runs_on_host(eqn, weights):
                flush(at)
                run = {"scan": self._add_scan, "while": self._add_while}
                run = run.get(eqn.primitive.name, self._add_call)
                results = run(eqn, [read(atom) for atom in eqn.invars])
                values.update(zip(eqn.outvars, results, strict=True))
            else:
                waiting.append(eqn)
        flush(len(jaxpr.eqns))
        return [read(atom) for atom in jaxpr.outvars]  # pyright: ignore

    def _add_program(
        self,
        jaxpr: Jaxpr,
        eqns: tuple[JaxprEqn, ...],
        values: dict[Var, _Value],
        last_uses: dict[Var, int],
        end: int,
    ) -> None:
        """Adds one program of all these operations, before the one numbered `end`."""
        results = {var for eqn in eqns for var in eqn.outvars}
        outputs = [
            v for eqn in eqns for v in eqn.outvars if last_uses.get(v, -1) >= end
        ]
        reads = (v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
        inputs = list(dict.fromkeys(v for v in reads if v not in results))
        # jax warns of a donated array that no result can take.
        free = Counter(map(_shape, outputs))
        donated = []
        for place, var in enumerate(inputs):
            kind, value = _shape(var), values[var]
            may = isinstance(value, int) and value not in self._kept
            if may and last_uses[var] < end and free[kind]:
                free[kind] -= 1
                donated.append(place)
        program = _compiled(jaxpr, eqns, tuple(inputs), tuple(outputs), tuple(donated))
        arguments = [values[v] for v in inputs]
        registers = self._call(program, arguments, len(outputs), donated)
        values.update(zip(outputs, registers, strict=True))

    def _add_call(self, eqn: JaxprEqn, operands: list) -> list[_Value]:
        function = _called(eqn)
        assert function is not None
        return self.add(function, operands)

    def _add_scan(self, eqn: JaxprEqn, operands: list) -> list[_Value]:
        """Adds the turns of a scan: each with its own weights, or as a loop."""
        params = eqn.params
        consts, carries = _scan_counts(params)
        ahead = consts + carries
        state, scanned = operands[consts:ahead], operands[ahead:]
        weights = tuple(isinstance(x, _Known) and x.weight for x in scanned)
        collected = eqn.outvars[carries:]
        if collected:
            zeros = _zeros(tuple(map(_shape, collected)))
            state += self._call(zeros, [], len(collected))
        if not params["length"]:
            return state
        turn = _turn(eqn, weights)
        order = range(params["length"])
        order = order[::-1] if params["reverse"] else order
        constants = operands[:consts]
        if not any(weights):
            return self._add_loop(turn, [*constants, *scanned], state, order)
        for t in order:
            parts = [
                _Known(np.asarray(x.array)[t], True) if is_weight else x
                for x, is_weight in zip(scanned, weights, strict=True)
            ]
            number = _Known(np.int32(t), False)
            state = self.add(turn, [*constants, *parts, number, *state])
        return state

    def _add_while(self, eqn: JaxprEqn, operands: list) -> list[_Value]:
        """Adds a while loop, whose condition the host asks for."""
        params, body = eqn.params, eqn.params["body_jaxpr"]
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        test = _compiled_condition(params["cond_jaxpr"])
        tested, constants, state = (
            operands[:first],
            operands[first:last],
            operands[last:],
        )
        turn = _numbered(body, params["body_nconsts"])
        return self._add_loop(turn, constants, state, repeat(0), tested, test)

    def _add_loop(
        self,
        turn: ClosedJaxpr,
        constants: list[_Value],
        state: list[_Value],
        order: Iterable[int],
        tested: Sequence[_Value] = (),
        test: Callable[..., Sequence[Any]] | None = None,
    ) -> list[_Value]:
        """Adds a step that runs a tape of its own again and again.

        Args:
          turn: function of the constants, the iteration's number and the state.
          order: numbers of the turns.
          tested: what `test` takes before the state.
          test: whether there is another turn.
        """
        tape = _Tape()
        fixed = [
            x if isinstance(x, _Known) else tape.register(stays=True) for x in constants
        ]
        number, begin = tape.register(stays=True), [tape.register() for _ in state]
        results = tape.add(turn, [*fixed, number, *begin])
        registers = [*(x for x in fixed if isinstance(x, int)), number]
        # The next turn may overwrite what this one returns.
        moved = [n for n, result in enumerate(results) if result != begin[n]]
        new = tape.separate([results[n] for n in moved], [*registers, *begin])
        for n, result in zip(moved, new, strict=True):
            results[n] = result
        overwritten = tape.finish(results)
        self._loops.append(tape)
        registers += begin
        ahead, split = len(tested) + len(registers) - 1 - len(begin), len(tested)

        def loop(*values: Any) -> Sequence[Any]:
            state = values[ahead:]
            for n in order:
                if test is not None and not test(*values[:split], *state)[0]:
                    break
                inputs = [*values[split:ahead], np.int32(n), *state]
                state = tape.run(registers, inputs, results)
            return state

        varying = [x for x in constants if isinstance(x, int)]
        donated = [ahead + n for n, x in enumerate(begin) if x in overwritten]
        outputs = self._call(loop, [*tested, *varying, *state], len(state), donated)
        # What the loop hands on unchanged is the same array.
        return [new if n in moved else state[n] for n, new in enumerate(outputs)]

    def separate(
        self, results: Sequence[_Value], shared: Sequence[int] = ()
    ) -> list[_Value]:
        """Copies known and repeated results, so that each can be overwritten.

        Args:
          shared: registers that are copied too.
        """
        seen: set[_Value] = set(shared)
        separate: list[_Value] = []
        for result in results:
            if isinstance(result, _Known) or result in seen:
                result = self._copy(result)
            seen.add(result)
            separate.append(result)
        return separate

    def _copy(self, value: _Value) -> int:
        return self._call(_copied, [value], 1)[0]

    def _call(
        self,
        program: Callable[..., Sequence[Any]],
        arguments: Sequence[_Value],
        results: int,
        donated: Iterable[int] = (),
    ) -> list[int]:
        """Adds a step and returns the registers of its results."""
        step = _Step(
            program=program,
            arguments=[
                _to_jax(x.array) if isinstance(x, _Known) else None for x in arguments
            ],
            inputs={n: x for n, x in enumerate(arguments) if isinstance(x, int)},
            outputs=[self.register() for _ in range(results)],
            donated=tuple(donated),
        )
        self._steps.append(step)
        return step.outputs

    def finish(self, results: Sequence[_Value]) -> set[int]:
        """Notes where each register is read last, and copies what must not be donated.

        Returns:
          The registers that steps overwrite.
        """
        needed = {x for x in results if isinstance(x, int)}
        overwritten, steps, pending = set(), [], self._steps
        while pending:
            step = pending.pop()
            for place in step.donated:
                value, reads = step.inputs.get(place), list(step.inputs.values())
                if value is None:
                    known = _Known(step.arguments[place], False)
                    step.inputs[place] = self._copy(known)
                elif value in needed | self._kept or reads.count(value) > 1:
                    step.inputs[place] = self._copy(value)
            step.last = [x for x in set(step.inputs.values()) if x not in needed]
            overwritten |= {step.inputs[place] for place in step.donated}
            needed |= set(step.inputs.values())
            steps.append(step)
        self._steps = steps[::-1]
        return overwritten

    def run(
        self, registers: Sequence[int], values: Sequence[Any], results: Sequence[_Value]
    ) -> list[Any]:
        """Fills registers with values, runs all steps, and returns the results."""
        held = dict(zip(registers, values, strict=True))
        for step in self._steps:
            arguments = step.arguments.copy()
            for place, register in step.inputs.items():
                arguments[place] = held[register]
            for register in step.last:
                del held[register]
            held.update(zip(step.outputs, step.program(*arguments), strict=True))
        return [held[x] if isinstance(x, int) else _to_jax(x.array) for x in results]


def _runs_on_host(eqn: JaxprEqn, weights: Sequence[bool]) -> bool:
    """Returns whether an operation scans over weights, or calls what does.

    Args:
      weights: which of its operands are weights.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        first, carries = _scan_counts(params)
        ahead = first + carries
        if any(weights[ahead:]):
            return True
        constant = [*weights[:first], *[False] * (len(weights) - first)]
        return _scans_weights(params["jaxpr"].jaxpr, constant)
    if name == "while":
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        constant = [*weights[first:last], *[False] * (len(weights) - last)]
        return _scans_weights(params["body_jaxpr"].jaxpr, constant)
    called = _called(eqn)
    return called is not None and _scans_weights(called.jaxpr, weights)


def _scans_weights(jaxpr: Jaxpr, weights: Sequence[bool]) -> bool:
    known = {var for var, is_one in zip(jaxpr.invars, weights, strict=True) if is_one}
    for eqn in jaxpr.eqns:
        flags = [not isinstance(x, Literal) and x in known for x in eqn.invars]
        if flags and all(flags) and _is_view(eqn):
            known.update(eqn.outvars)
        elif _runs_on_host(eqn, flags):
            return True
    return False


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the function that an operation does nothing but call, or None."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr"):  # jit, remat; custom_jvp, custom_vjp
        function = eqn.params.get(name)
        if isinstance(function, ClosedJaxpr):
            return function
        if isinstance(function, Jaxpr):
            return ClosedJaxpr(function, ())
    return None


def _is_view(eqn: JaxprEqn) -> bool:
    called = _called(eqn)
    if called is not None:
        return not called.consts and all(map(_is_view, called.jaxpr.eqns))
    return eqn.primitive.name in _VIEWS


def _view(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    called = _called(eqn)
    if called is None:
        return [_VIEWS[eqn.primitive.name](np.asarray(arrays[0]), eqn.params)]
    values = dict(zip(called.jaxpr.invars, arrays, strict=True))
    for part in called.jaxpr.eqns:
        results = _view(part, [values[x] for x in part.invars])  # pyright: ignore[reportArgumentType]
        values.update(zip(part.outvars, results, strict=True))
    return [values[x] for x in called.jaxpr.outvars]  # pyright: ignore[reportArgumentType]


def _last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """Returns which operation reads a variable last; after all: it is a result."""
    uses = {x: n for n, eqn in enumerate(jaxpr.eqns) for x in _variables(eqn.invars)}
    return uses | {x: len(jaxpr.eqns) for x in _variables(jaxpr.outvars)}


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [x for x in atoms if not isinstance(x, Literal)]


def _scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many constants and how many carries a scan has."""
    if "ft_in" in params:  # jax 0.12 groups the operands
        constants, carries, _ = params["ft_in"].unpack()
        return len(constants), len(carries)
    return params["num_consts"], params["num_carry"]


@cache
def _turn(scan: JaxprEqn, weights: tuple[bool, ...]) -> ClosedJaxpr:
    """Makes one turn of a scan a function that takes the turn's number.

    Its arguments are the constants, what is scanned (of weights one turn's, of
    everything else all), the number, the carry and what the turns collect.
    """
    params = scan.params
    body, (consts, carries) = params["jaxpr"], _scan_counts(params)
    ahead, first = consts + carries, consts + len(weights)
    parts = [
        _shape(body.jaxpr.invars[n] if is_weight else scan.invars[n])
        for n, is_weight in enumerate(weights, ahead)
    ]

    def turn(*arguments: Any) -> list[Any]:
        constants, scanned = arguments[:consts], arguments[consts:first]
        number, state = arguments[first], arguments[first + 1 :]
        taken = [
            x if is_weight else jax.lax.dynamic_index_in_dim(x, number, 0, False)
            for x, is_weight in zip(scanned, weights, strict=True)
        ]
        results = jaxpr_as_fun(body)(*constants, *state[:carries], *taken)
        new = zip(state[carries:], results[carries:], strict=True)
        update = jax.lax.dynamic_update_index_in_dim
        return [*results[:carries], *(update(x, y, number, 0) for x, y in new)]

    state = [*scan.invars[consts:ahead], *scan.outvars[carries:]]
    constants = map(_shape, scan.invars[:consts])
    return jax.make_jaxpr(turn)(*constants, *parts, _NUMBER, *map(_shape, state))


@cache
def _numbered(body: ClosedJaxpr, consts: int) -> ClosedJaxpr:
    """Gives a loop's body an argument more, between its constants and its state."""
    jaxpr = body.jaxpr
    shapes = [_shape(x) for x in jaxpr.invars]

    def turn(*arguments: Any) -> list[Any]:
        return jaxpr_as_fun(body)(*arguments[:consts], *arguments[consts + 1 :])

    return jax.make_jaxpr(turn)(*shapes[:consts], _NUMBER, *shapes[consts:])


_NUMBER = jax.ShapeDtypeStruct((), np.int32)


@cache
def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[], list[Any]]:
    return _compile(lambda: [jnp.zeros(x.shape, x.dtype) for x in shapes])


def _copied(x: Any) -> list[Any]:
    return [jax.device_put(x, may_alias=False)]  # compiles nothing


def _compile(
    function: Any, shapes: Iterable[Any] = (), donated: tuple[int, ...] = ()
) -> Callable[..., Any]:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
    return jax.jit(function, donate_argnums=donated).lower(*shapes).compile()


@cache
def _compiled(
    jaxpr: Jaxpr,
    eqns: tuple[JaxprEqn, ...],
    inputs: tuple[Var, ...],
    outputs: tuple[Var, ...],
    donated: tuple[int, ...],
) -> Callable[..., Sequence[Any]]:
    part = jaxpr.replace(constvars=(), invars=inputs, outvars=outputs, eqns=eqns)
    function = jaxpr_as_fun(ClosedJaxpr(part, ()))
    return _compile(function, map(_shape, inputs), donated)


@cache
def _compiled_condition(condition: ClosedJaxpr) -> Callable[..., Sequence[Any]]:
    return _compile(jaxpr_as_fun(condition), condition.in_avals)


def _shape(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _to_jax(array: Any) -> jax.Array:
    """Returns an array of jax; of a view it shares the memory, where it is aligned."""
    if isinstance(array, jax.Array):
        return array
    return jax.device_put(array, may_alias=True)
