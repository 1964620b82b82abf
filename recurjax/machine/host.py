"""Settings of the process that make XLA faster on CPU; they count from its start.

Both are of the process, not of a program, so a library must not touch them: the command
line and the scripts do, before jax is imported. Measured in docs/benchmarks.md.
"""

import ctypes
import os
import sys
from importlib.metadata import version

_FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
_KNOWN = ("0.10.", "0.11.", "0.12.")
"""The jaxlib versions that know this flag; XLA ends a process that names another."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""glibc's names for what mallopt sets (malloc.h)."""


def prepare() -> None:
    """Keeps freed memory for the next step, and products on XLA's plain kernels.

    A training step frees its buffers and asks for the same ones again; by default
    glibc hands large ones back, and the kernel clears every page anew. The process then
    stays as large as its largest step. Where there is no glibc, nothing is set.

    XLA's YNN fusions are slower than its plain kernels on the products of these models.
    A choice already made in XLA_FLAGS stands.
    """
    if sys.platform == "linux":
        _keep_freed_memory()
    flags = os.environ.get("XLA_FLAGS", "")
    # A flag that this jaxlib does not know would end the process.
    if _FUSIONS not in flags and version("jaxlib").startswith(_KNOWN):
        os.environ["XLA_FLAGS"] = f"{flags} {_FUSIONS}=".strip()


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**28)
