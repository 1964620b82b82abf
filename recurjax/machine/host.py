"""Settings of the process that make XLA faster; they count from its start.

All are of the process, not of a program, so a library must not touch them: the command
line and the scripts do, before jax is imported or queried for its devices. The number
of CPU devices is also set for a caller that needs a mesh of several (`reading_mesh`),
which would otherwise fail. Those for CPU are measured in docs/benchmarks.md.
"""

import ctypes
import os
import sys
from contextlib import suppress
from importlib.metadata import version

from recurjax.errors import UserError

_CPU_PRODUCTS = "--xla_cpu_experimental_ynn_fusion_type"
_FLAGS = {
    # XLA's YNN fusions are slower than its plain kernels on the products of training.
    _CPU_PRODUCTS: "",
}
_READING = {
    # The plain kernels take up to 30 times as long for a few rows times a matrix whose
    # rows are the outputs, as a tied head is: 4 texts cost what 4 times one does.
    _CPU_PRODUCTS: "individual_dot",
}
_DEVICES = "xla_force_host_platform_device_count"
_KNOWN = ("0.10.", "0.11.", "0.12.")
"""The jaxlib versions that know these flags; XLA ends a process that names another."""

_kept = False
"""Whether this process keeps the memory that it frees."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""glibc's names for what mallopt sets (malloc.h)."""


def prepare(*, flags: bool = True, reading: bool = False) -> None:
    """Keeps freed memory for the next step, and sets XLA's flags for these models.

    A training step frees its buffers and allocates the same ones again. By default
    glibc returns large ones to the kernel, which then clears every page again. The
    process then stays as large as its largest step, and grows where steps alternate
    with other work (`give_back_freed_memory`). Where there is no glibc, nothing is set.

    Args:
      flags: whether to set those of XLA's that XLA_FLAGS does not name already; the
        others stand in any case.
      reading: whether models are read and continued, and not trained.
    """
    if sys.platform == "linux":
        _keep_freed_memory()
    # A flag that this jaxlib does not know would end the process.
    if flags and version("jaxlib").startswith(_KNOWN):
        _set_flags(_FLAGS | _READING if reading else _FLAGS)


def give_back_freed_memory() -> None:
    """Gives back the pages that this process has freed, where `prepare` kept them.

    Kept memory is one heap: what an evaluation or a checkpoint leaves in it, between
    the steps' buffers, makes holes that the next steps' buffers do not fit, so that a
    process grows by each. To be called after such work; the next step faults its pages
    in once more.
    """
    if _kept:
        ctypes.CDLL(None).malloc_trim(0)


def check_flags() -> None:
    """Refuses an XLA_FLAGS that XLA takes for a file's name when there is no such file.

    XLA would end the process.

    Raises:
      UserError: it does not begin with `--`, and no file has that name.
    """
    value = os.environ.get("XLA_FLAGS", "")
    if not _are_flags(value) and not os.path.isfile(value):
        raise UserError(
            "XLA_FLAGS must be flags, which begin with --, or a file of "
            f"flags, got {value[:100]!r}: correct or unset it"
        )


def _are_flags(value: str) -> bool:
    return not value.strip() or value.lstrip().startswith("--")


def _set_flags(flags: dict[str, str]) -> None:
    if not _are_flags(os.environ.get("XLA_FLAGS", "")):
        return  # a file of flags, next to which XLA takes no others
    present = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in present}
    ours = [f"{flag}={value}" for flag, value in flags.items() if flag not in names]
    os.environ["XLA_FLAGS"] = " ".join([*present, *ours])


def start_cpu_devices(count: int) -> None:
    """Has a CPU count as `count` devices, when jax comes to look for them.

    For a mesh of more than one device: loops of one program never overlap on a CPU, so
    that a recurrence runs on one core; two devices run theirs side by side, each on its
    own rows. GPUs and TPUs are counted as ever.

    Nothing is done for more devices than cores, which would only take turns; nor where
    the number is fixed: by JAX_NUM_CPU_DEVICES or XLA_FLAGS, by several processes that
    are one program, or since jax has looked already.
    """
    import jax

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    fixed = (
        getattr(jax.config, "jax_num_cpu_devices") != -1  # noqa: B009
        or _DEVICES in os.environ.get("XLA_FLAGS", "")
        or jax.distributed.is_initialized()
    )
    if not fixed and 1 < count <= (cores or 1):
        with suppress(RuntimeError):  # jax has looked for its devices already
            jax.config.update("jax_num_cpu_devices", count)


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return
    mallopt(_MMAP_MAX, 0)
    # XLA allocates on threads. A thread's own arena has no room for a large buffer and
    # maps it all the same, so that all share the one arena that keeps.
    mallopt(_ARENA_MAX, 1)
    # Never: any threshold would be an int, and a step's buffers can be above 2 GiB.
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_TOP_PAD, 2**28)
    global _kept
    _kept = True
