"""Which block sizes a traced call runs with: the caller's or its heuristic's."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.target import Target, as_if

GPU = Target(platform="gpu", kind="an A10", compute_capability="8.6")
HOPPER = Target(platform="gpu", kind="an H100", compute_capability="9.0")
TPU = Target(platform="tpu", kind="TPU v5 lite")


def program(run: Callable[..., Any], arrays: Any, target: Target, **options: Any):
    """Returns the text of both passes of `run(*arrays, **options)` on a target."""

    def both(*arrays):
        out, pull = jax.vjp(lambda *given: run(*given, **options), *arrays)
        return pull(out)

    with as_if(target):
        return str(jax.make_jaxpr(both)(*arrays))


def assert_given_sizes_are_taken(
    run: Callable[..., Any], arrays: Any, target: Target, blocks: Any
) -> None:
    """Checks that `blocks`, other sizes than the heuristic's, make another program."""
    free = program(run, arrays, target)
    assert program(run, arrays, target, blocks=blocks) != free
    assert program(run, arrays, target, blocks=type(blocks)()) == free
