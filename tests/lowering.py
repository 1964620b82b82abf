"""Lowers the compile cases of all ops with this jax: a warning is an error.

    JAX_PLATFORMS=cpu PYTHONPATH=.compilers:. python -m tests.lowering [SUBSTRING]

`make test-lowering` runs it on Python 3.12 with jax 0.11.2 and 0.12. It lowers for an
H100 and a v5e that are not here, and no compiler of theirs is asked: Triton alone
makes PTX of the kernels that jax-triton launches. Prints each case's seconds.
"""

import importlib
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.target import Target, as_if

ROOT = Path(__file__).resolve().parents[1]
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
V5E = Target(platform="tpu", kind="TPU v5 lite")


def cases() -> Iterator[tuple[str, Target]]:
    """Yields "module:function" of every case, and its device."""
    for path in sorted(ROOT.glob("tests/pallas_kernels/*/compile_cases.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in vars(importlib.import_module(module)):
            if name.startswith(("gpu_", "tpu_")) and name != "gpu_class":
                yield f"{module}:{name}", H100 if name.startswith("gpu_") else V5E


def lower(case: str, target: Target) -> None:
    """Lowers a case for a device that is not here."""
    module, name = case.split(":")
    function, arguments = getattr(importlib.import_module(module), name)()
    platform = {"gpu": "cuda"}.get(target.platform, target.platform)
    cores = 1 if platform == "tpu" else None
    device = AbstractDevice(target.kind, cores, platform)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with (
        warnings.catch_warnings(),
        as_if(target),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        warnings.simplefilter("error")
        # Deprecated as a part of jax; the kernels use no deprecated function of it.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))


def main(part: str = "") -> None:
    """Lowers the cases whose name has the part in it."""
    began = time.monotonic()
    matches = [(case, target) for case, target in cases() if part in case]
    for case, target in matches:
        start = time.monotonic()
        lower(case, target)
        print(f"{time.monotonic() - start:6.1f} s  {case}", flush=True)
    print(
        f"jax {jax.__version__}: {len(matches)} cases, {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
