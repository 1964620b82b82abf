"""How tests compile, and how large what they compile is."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src import compiler
from jax.extend.core import JaxprEqn, jaxprs_in_params


def _known(name: str, value: object) -> bool:
    """Whether this version of XLA has the option."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


_FASTER = {
    "xla_backend_optimization_level": 0,
    # Loops of one fusion are lowered through MLIR otherwise: most of the time.
    "xla_cpu_use_fusion_emitters": False,
    # Else a program is cut into 32 modules, for threads that a test has not.
    "xla_cpu_parallel_codegen_split_count": 1,
}


def quick_options(backend: str) -> dict[str, bool | int]:
    """Returns what compiles quickly: nothing off a CPU, where level 0 is other code.

    LLVM compiles a GPU's kernels too, and a test that runs on a GPU is a test of the
    kernel that users run.
    """
    if backend != "cpu":
        return {}
    return {name: value for name, value in _FASTER.items() if _known(name, value)}


QUICK_COMPILE = quick_options(jax.default_backend())
"""For `jax.jit(..., compiler_options=...)`: a fourth to a third of the time to compile
on CPU, where tiny programs run once or twice and are not worth optimising."""


@contextmanager
def all_compiled_quickly() -> Iterator[None]:
    """Compiles by `QUICK_COMPILE` whatever is compiled while the body runs.

    Operations outside `jax.jit` too, and what other threads compile; a program's own
    `compiler_options` win. jax has no setting for that but XLA_FLAGS, which ends the
    process where a version does not know a flag.
    """
    options_for = compiler.get_compile_options

    def quick(*args, env_options_overrides=None, **others):
        chosen = QUICK_COMPILE | (env_options_overrides or {})
        return options_for(*args, env_options_overrides=chosen, **others)

    compiler.get_compile_options = quick
    try:
        yield
    finally:
        compiler.get_compile_options = options_for


def scatters(jaxpr) -> Iterator[JaxprEqn]:
    """Yields the scatters of a traced program, inner ones too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scatter":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scatters(inner)


def equations(jaxpr) -> int:
    """Counts the equations of a program, those of its loops' bodies once."""
    return sum(
        1 + sum(equations(inner) for inner in jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def sizes(jaxpr) -> Iterator[int]:
    """Yields the elements of every array that a program makes, loops' bodies too."""
    for equation in jaxpr.eqns:
        yield from (math.prod(var.aval.shape) for var in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """Collects an entry for each program that is compiled while the body runs."""
    matches: list[str] = []

    def count(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            matches.append(f"{duration:.3f} s")

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield matches
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
