"""FLOPs of the matrix products in a program, counted without running it."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params


def product_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts 2 M N K for every product that a call makes, its scans' turns included.

    Args:
      function: traced, not run.
      arguments: arrays, or what `jax.eval_shape` makes of them.

    Raises:
      NotImplementedError: the program has a loop of unknown length, or branches.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = math.prod(shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        within = sum(_count(inner) for inner in jaxprs_in_params(params))
        if within and name in ("while", "cond"):
            raise NotImplementedError(f"product_flops: cannot count a {name}")
        total += within * (params["length"] if name == "scan" else 1)
    return total
