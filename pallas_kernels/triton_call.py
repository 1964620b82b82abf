"""Launches kernels of Triton's language from jax, by jax-triton.

jax-triton is an optional package (`pip install "recurjax[cuda]"`): nothing imports it,
or Triton, before a kernel is launched or a backend is asked whether it can be.
"""

import importlib
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import target
from pallas_kernels.triton_launches import LEAST_TRITON, serves_kernels


def refusal_of_packages() -> str | None:
    """Returns which package is missing for kernels on the target GPU, or None.

    A backend asks last, of a call that its kernels could run, because this warns once
    that XLA runs such calls.
    """
    reason = missing_package()
    if reason is not None:
        _warn(reason)
    return reason


@cache
def missing_package() -> str | None:
    """Returns which package must be installed before kernels can be launched."""
    install = 'install it with: pip install "recurjax[cuda]"'
    try:
        triton = importlib.import_module("triton")
        jax_triton = importlib.import_module("jax_triton")
    except ImportError as error:
        return f"needs jax-triton ({error}); {install}"
    if not serves_kernels(triton.__version__):
        least = ".".join(map(str, LEAST_TRITON))
        return f"needs triton {least} or newer, found {triton.__version__}; {install}"
    if jax_triton.__version_info__[:2] != (0, 3):
        return f"needs jax-triton 0.3, found {jax_triton.__version__}; {install}"
    return None


@cache
def _warn(reason: str) -> None:
    message = f"scans run on XLA instead of their GPU kernels: {reason}"
    warnings.warn(message, stacklevel=2)


def float32_shape(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an output in float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def launch(
    kernel: str,
    *arguments: jax.Array | int,
    grid: int,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    **constants: Any,
) -> list[jax.Array]:
    """Runs a kernel in `grid` programs and returns its outputs.

    Args:
      kernel: "module:function". It takes references to the arrays among the arguments,
        their numbers as scalars, and then references to the outputs.
      warps: warps of a program.
      constants: by name, the kernel's compile-time arguments.
    """
    jax_triton = importlib.import_module("jax_triton")
    module, function = kernel.split(":")
    # Of the target and not of the first device here: it may not be here at all.
    capability = int(target.current().compute_capability.replace(".", ""))
    with jax.named_scope(function):
        return jax_triton.triton_call(
            *arguments,
            kernel=getattr(importlib.import_module(module), function),
            grid=(grid,),
            num_warps=warps,
            num_stages=1,
            name=function,
            compute_capability=capability,
            out_shape=tuple(out_shape),
            **constants,
        )
