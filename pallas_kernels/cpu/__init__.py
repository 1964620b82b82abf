"""Kernels in C++ for CPUs, which an installation has where a compiler built them.

XLA calls them through its foreign function interface and lends them its threads. The
library beside this file is no module of Python: ctypes opens it, so that its build
needs none of Python's headers.
"""

import ctypes
import importlib.util
from functools import cache
from typing import Any

import jax
import numpy as np

from pallas_kernels import target
from pallas_kernels.mesh_cut import free_axes

_NAMES = (
    "recurjax_attention_forward",
    "recurjax_attention_backward",
    "recurjax_cache_read",
    "recurjax_few_rows",
    "recurjax_panels",
)


def refusal() -> str | None:
    """Returns why the target's programs cannot call the kernels, None if they can."""
    reason = target.refusal_of_host_calls()
    if reason is not None:
        return reason
    library = _library()
    return library if isinstance(library, str) else None


def serves() -> bool:
    """Returns whether a call here can be a kernel's: XLA cannot cut one over a mesh."""
    return not free_axes() and refusal() is None


def lanes() -> int:
    """Returns how many float32 the kernels' vectors hold on this processor."""
    library = _library()
    assert not isinstance(library, str), library
    return library.recurjax_cpu_lanes()


def call(
    name: str,
    results: Any,
    *arrays: jax.Array,
    vmap_method: str = "broadcast_all",
    **options: int | float,
) -> Any:
    """Calls a kernel.

    Args:
      results: ShapeDtypeStructs of what it returns.
      vmap_method: of `jax.ffi.ffi_call`; by default the kernel knows axes of `vmap` in
        front of all arrays' own.
      options: float and int are the kernel's float32 and int64.
    """
    attributes = {
        key: np.float32(value) if isinstance(value, float) else np.int64(value)
        for key, value in options.items()
    }
    kernel = jax.ffi.ffi_call(f"recurjax_{name}", results, vmap_method=vmap_method)
    return kernel(*arrays, **attributes, lanes=np.int64(lanes()))


@cache
def _library() -> ctypes.CDLL | str:
    """Opens the library and registers its kernels; returns why that is impossible."""
    file = _file()
    if file is None:
        return "the C++ kernels are not built: install recurjax where there is g++"
    try:
        library = ctypes.CDLL(file)
        for name in _NAMES:
            kernel = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, kernel, platform="cpu")
    except Exception as error:  # Of the linker, or of XLA for another version's kernel.
        return f"the C++ kernels do not load, reinstall recurjax: {error}"
    library.recurjax_cpu_lanes.restype = ctypes.c_int64
    if not library.recurjax_cpu_lanes():
        return "the processor has no AVX2"
    return library


def _file() -> str | None:
    found = importlib.util.find_spec("pallas_kernels.cpu.kernels")
    return None if found is None else found.origin
