"""FLOPs of a program as it is executed, counted on its jaxpr.

The compilers' own counts take a loop's body once, whatever its trip count, and do not
see inside kernels. Here a scan counts `length` times. A kernel counts its launch's
`cost_estimate`, or else its body once per point of the grid. A `shard_map` counts once
per device that runs it. Work that the backward pass recomputes (`jax.checkpoint`)
counts again, because it is in the jaxpr twice.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

_FREE = {
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type"),
    *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "iota"),
    *("gather", "scatter", "copy", "copy_p", "rev", "select_n", "bitcast_convert_type"),
    *("stop_gradient", "sharding_constraint", "get", "swap", "split", "program_id"),
    *("optimization_barrier", "device_put", "pvary", "num_programs", "axis_index"),
}
"""Primitives that move numbers or choose among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """The FLOPs of a program on all devices together.

    Attributes:
      products: 2 a multiplication and addition of matrix products and convolutions.
      other: one for each element that any other arithmetic makes.
      unknown_loops: loops whose trip count is known at run time only; each counted as
        one trip.
    """

    products: int = 0
    other: int = 0
    unknown_loops: int = 0

    def __add__(self, more: "Flops") -> "Flops":
        return Flops(
            products=self.products + more.products,
            other=self.other + more.other,
            unknown_loops=self.unknown_loops + more.unknown_loops,
        )

    def times(self, count: int) -> "Flops":
        """Returns the FLOPs of `count` such programs one after another."""
        return Flops(
            products=count * self.products,
            other=count * self.other,
            unknown_loops=self.unknown_loops,
        )


def count_flops(jaxpr: Any, *, platform: str) -> Flops:
    """Counts the FLOPs of a jaxpr.

    Args:
      jaxpr: a Jaxpr or ClosedJaxpr.
      platform: "tpu", "cuda" or "cpu": which branch of `lax.platform_dependent` runs.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    backends: dict[Any, int] = {}
    total = Flops()
    for equation in jaxpr.eqns:
        # `platform_dependent` is a cond whose index another primitive makes from the
        # platform: remember which branch this platform takes, for the cond below.
        if equation.primitive.name == "platform_index":
            index = _branch(equation.params["platforms"], platform)
            backends[equation.outvars[0]] = index
        total += _of_equation(equation, backends, platform)
    return total


def _of_equation(equation: Any, backends: dict[Any, int], platform: str) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "ragged_dot_general"):
        return Flops(products=_of_product(equation))
    if name == "conv_general_dilated":
        return Flops(products=_of_convolution(equation))
    if name == "scan":
        body = count_flops(params["jaxpr"], platform=platform)
        return body.times(params["length"])
    if name == "while":
        return _of_while(equation, platform)
    if name == "cond":
        branches = [count_flops(b, platform=platform) for b in params["branches"]]
        # A branch that is known runs alone; of branches chosen at run time the dearest
        # counts, so that a plan promises no more than the program can keep.
        index = equation.invars[0]
        if isinstance(index, Literal):
            return branches[int(index.val)]
        if index in backends:
            return branches[backends[index]]
        return max(branches, key=lambda branch: (branch.products, branch.other))
    inner = list(jaxprs_in_params(params))
    if name == "pallas_call":
        # A kernel whose loops end by the program's place in the grid says itself what
        # all its programs do.
        if (estimate := params.get("cost_estimate")) is not None:
            return Flops(products=estimate.flops, other=estimate.transcendentals)
        # The jaxpr is what one program of the grid does; dynamic sizes count as one.
        grid = [size for size in params["grid_mapping"].grid if isinstance(size, int)]
        kernel = count_flops(params["jaxpr"], platform=platform)
        return kernel.times(math.prod(grid))
    if name == "shard_map":
        # Its body is one device's share. Only axes that become manual here are
        # multiplied: an outer shard_map has counted its own.
        axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
        devices = math.prod(params["mesh"].shape[axis] for axis in axes)
        return count_flops(params["jaxpr"], platform=platform).times(devices)
    if name in ("custom_jvp_call", "custom_vjp_call"):  # not their rules
        return count_flops(params["call_jaxpr"], platform=platform)
    if inner:
        # A reduction's jaxpr says how two elements combine: once for each element, not
        # once. Any other primitive with a jaxpr (jit, remat, custom rules) runs it.
        if name.startswith(("reduce", "sort", "scatter", "argm", "cum")):
            return Flops(other=_elements(equation.invars))
        return sum((count_flops(jaxpr, platform=platform) for jaxpr in inner), Flops())
    if name.startswith(("reduce_", "cum", "argm")):
        return Flops(other=_elements(equation.invars))
    return Flops(other=0 if name in _FREE else _elements(equation.outvars))


def _of_while(equation: Any, platform: str) -> Flops:
    trips = _trips(equation)
    body = count_flops(equation.params["body_jaxpr"], platform=platform)
    if trips is None:
        return body + Flops(unknown_loops=1)
    return body.times(trips)


def _trips(equation: Any) -> int | None:
    """Returns a loop's trip count where `i < n` with known numbers ends it."""
    params = equation.params
    test = params["cond_jaxpr"].jaxpr
    # The condition must be the one comparison `counter < number`, ...
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return None
    counter, bound = test.eqns[0].invars
    if not isinstance(bound, Literal) or isinstance(counter, Literal):
        return None
    # ... the counter a part of the carry: its place there, ...
    place = test.invars.index(counter) - params["cond_nconsts"]
    if place < 0:
        return None
    # ... and the body must add 1 to it, starting from a known number.
    body = params["body_jaxpr"].jaxpr
    nexts = [e for e in body.eqns if body.outvars[place] in e.outvars]
    carry = body.invars[params["body_nconsts"] + place]
    # The loop's operands: constants of the condition, of the body, then the carry.
    consts = params["cond_nconsts"] + params["body_nconsts"]
    first = equation.invars[consts + place]
    steps_by_one = (
        len(nexts) == 1
        and nexts[0].primitive.name == "add"
        and nexts[0].invars[0] is carry
        and isinstance(nexts[0].invars[1], Literal)
        and int(nexts[0].invars[1].val) == 1
    )
    if not steps_by_one or not isinstance(first, Literal):
        return None
    return max(int(bound.val) - int(first.val), 0)


def _of_product(equation: Any) -> int:
    left = equation.invars[0].aval.shape
    numbers = equation.params.get("dimension_numbers")
    if numbers is None:  # ragged: each row meets one group's matrix
        return 2 * math.prod(equation.outvars[0].aval.shape) * left[-1]
    (contracted, _), _ = numbers
    summed = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * summed


def _of_convolution(equation: Any) -> int:
    # Each output element sums over all of a filter but its output channels.
    kernel = equation.invars[1].aval.shape
    out = equation.params["dimension_numbers"].rhs_spec[0]
    taps = math.prod(kernel) // kernel[out]
    return 2 * math.prod(equation.outvars[0].aval.shape) * taps


def _elements(variables: Any) -> int:
    shapes = [getattr(var.aval, "shape", None) for var in variables]
    return sum(math.prod(shape) for shape in shapes if shape is not None)


def _branch(platforms: Any, platform: str) -> int:
    """Returns the branch of `platform_dependent` for a platform."""
    for index, names in enumerate(platforms):
        if names is None or platform in names:
            return index
        if platform == "cuda" and "gpu" in names:
            return index
    raise ValueError(f"count_flops: no branch for {platform} among {platforms}")
