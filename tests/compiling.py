"""How tests compile, and how large what they compile is."""

import math
from collections.abc import Iterator

from jax.extend.core import jaxprs_in_params

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""For `jax.jit(..., compiler_options=...)`: halves the time to compile on CPU, where
tiny programs run once or twice and are not worth optimising."""


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
